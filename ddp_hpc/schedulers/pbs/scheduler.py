"""Support for PBS Professional and OpenPBS: directives of job scripts, and allocations of running jobs."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_hpc.errors import RequestError
from ddp_hpc.request.job import Job
from ddp_hpc.request.rank_layout import Layout
from ddp_hpc.schedulers.allocation import Allocation
from ddp_hpc.schedulers.base import (
    Directives,
    Overrides,
    Scheduler,
    ScriptOptions,
    optional_value,
    resource_values,
    whole_number,
)
from ddp_hpc.schedulers.pbs.submit_options import LACKS, submit_options, with_memory
from ddp_hpc.sites.site import Site
from ddp_hpc.units import format_walltime, parse_walltime_s

if TYPE_CHECKING:
    from ddp_hpc.schedulers.device_share import DeviceShare
    from ddp_hpc.schedulers.machine_facts import MachineFacts, Question
    from ddp_hpc.schedulers.running_job import RunningJob

# Older servers truncate or reject longer names.
MAX_NAME_CHARS = 15
# The default of PBS, 077, hides the results from the other members of the project.
_UMASK = "-W umask=022"

# Options without a value, of OpenPBS's qsub (qsub.1B) and of Torque's (src/cmds/qsub_functions.c).
_BARE = frozenset("VXIhfznEx")


class Pbs(Scheduler):
    """The PBS scheduler.

    kill_delay, the time from SIGTERM to SIGKILL, is 10 s by default (pbs_server_attributes.7B).
    """

    name = "pbs"
    title = "PBS"
    template = "pbs.sh.j2"
    submit_program = "qsub"
    launchers = ("mpiexec", "torchrun")
    can_requeue = True
    kill_delay_s = 10
    first_node_in_shell = '$(head -n 1 "$PBS_NODEFILE")'
    job_number_in_shell = "(${PBS_JOBID%%[!0-9]*} + ${PBS_ARRAY_INDEX:-0})"
    agent_launcher = "mpiexec"
    why_omp_num_threads = "PBS would set this to the number of cores of the whole node, for each rank."
    interactive_command = "qsub -I"
    can_chain = True
    requests_by_resources = True
    lacks = LACKS
    prefix = "#PBS"
    log_flags = ("-o", "-e")
    job_id_variable = "PBS_JOBID"
    # PBS_ARRAYID is the name in Torque.
    start_variable = "PBS_JOBCOOKIE"
    array_index_variables = ("PBS_ARRAY_INDEX", "PBS_ARRAYID")
    array_directive = re.compile(rb"^#PBS[ \t]+-J.*\n", re.MULTILINE)
    commands = ("qsub", "qstat", "qdel")
    query_command = "qstat"
    # The mpiexec of MPICH 5.0.2 quotes the command for a shell, which pbs_tmrsh alone does not start.
    start_without_ssh = (
        "use the MPI of the site, or let mpiexec start ranks with pbs_tmrsh: write an executable script "
        """with the line `host=$1; shift; exec pbs_tmrsh "$host" /bin/sh -c "$*"`, and add the options """
        "--env HYDRA_LAUNCHER=rsh --env HYDRA_LAUNCHER_EXEC=/PATH/OF/THE/SCRIPT"
    )
    job_id_pattern = re.compile(r"[.[]")
    queue_flag = "-q"
    walltime_directive = "#PBS -l walltime=HH:MM:SS"
    # The formats that decode_time in OpenPBS's attr_fn_time.c accepts, and DD:HH:MM:SS of Torque.
    walltime_pattern = re.compile(r"(?:\d{1,9}:){0,2}\d{1,9}(?:\.\d*)?|\d{1,9}(?::\d{1,9}){3}")
    expands_log_variables = True

    def directives(self, job: Job, site: Site, layout: Layout) -> Directives:
        if len(job.name) > MAX_NAME_CHARS:
            raise RequestError(
                f"job name {job.name!r} has {len(job.name)} characters, but PBS accepts at most "
                f"{MAX_NAME_CHARS}. Use a shorter name."
            )
        resources = resource_values(job, site, layout, site.pbs.resources)
        if job.exclusive:
            if not any(text.startswith("select=") for text in resources):
                raise RequestError(
                    f"--exclusive was given, but jobs for {site.title} request CPUs without chunks (select), "
                    "and PBS reserves whole nodes only for chunks. Remove --exclusive."
                )
            resources = [text for text in resources if not text.startswith("place=")]
        return {
            **super().directives(job, site, layout),
            "resources": with_memory(resources, job) if job.mem else resources,
            "filesystems_resource": site.pbs.filesystems_resource,
            "filesystems": optional_value("filesystems", job.filesystems or site.pbs.filesystems),
            "options": [*site.pbs.options, _UMASK],
            "variables": profile_variables(site),
        }

    def device_share(self, queue: str, gpus_per_node: int) -> DeviceShare | None:
        from ddp_hpc.schedulers.pbs import ask_nodes

        return ask_nodes.device_share(queue, gpus_per_node)

    def questions(self) -> tuple[Question, ...]:
        from ddp_hpc.schedulers.pbs.ask_machine import QUESTIONS

        return QUESTIONS

    def read_answers(self, answers: Mapping[str, str], site: Site) -> MachineFacts:
        from ddp_hpc.schedulers.pbs import ask_machine

        return ask_machine.read_answers(answers, site, self.walltime_s)

    def version_of(self, site: Site) -> str:
        return site.pbs.version

    def submit_options(self, job: Job, site: Site, layout: Layout) -> list[str]:
        return submit_options(job)

    def umask_arguments(self, script: ScriptOptions, umask: int) -> list[str]:
        is_default = any(f"{one.flag} {one.value}" == _UMASK for one in script.read())
        own = f"umask={umask:03o}"
        return ["-W", own] if is_default and f"-W {own}" != _UMASK else []

    def submit_argv(
        self, script: str, options: Sequence[str], after: str = "", variables: str = ""
    ) -> list[str]:
        chain = ["-W", f"depend=afterany:{after}"] if after else []
        return ["qsub", *options, *chain, *(["-v", variables] if variables else []), script]

    def overrides(self, asked: Overrides, script: ScriptOptions, site: Site | None) -> list[list[str]]:
        if asked.qos:
            raise RequestError(f"--qos {asked.qos} was given, but PBS has no QOS; omit this option")
        found = []
        if asked.num_nodes:
            found.append(["-l", f"select={asked.num_nodes}{_one_chunk(script, asked.num_nodes)}"])
        if asked.walltime_s:
            found.append(["-l", f"walltime={format_walltime(asked.walltime_s)}"])
        if asked.queue:
            found.append(["-q", asked.queue])
        if asked.name:
            found.append(["-N", asked.name])
        return found

    def split_options(self, words: Sequence[str]) -> Iterator[tuple[str, str]]:
        index = 0
        while index < len(words):
            word, index = words[index], index + 1
            if word.startswith("#"):
                return  # the rest is a comment, which another check of lint reports
            if not word.startswith("-"):
                yield "", word
                continue
            flag, value = (word, "") if word.startswith("--") else (word[:2], word[2:])
            if not value and word[1:2] not in _BARE and index < len(words):
                value, index = words[index], index + 1
            yield flag, value

    def num_nodes(self, script: ScriptOptions) -> int | None:
        chunk = _only_chunk(script)
        return chunk[0] if chunk else None

    def ranks_per_node(self, script: ScriptOptions) -> int | None:
        return _in_chunk(script, "mpiprocs")

    def gpus_per_node(self, script: ScriptOptions) -> int | None:
        return _in_chunk(script, "ngpus")

    def cpus_per_rank(self, script: ScriptOptions) -> int | None:
        select = _last_resource(script, "select")
        match = re.search(r":ncpus=(\d{1,6})\b", select[1]) if select else None
        ranks = self.ranks_per_node(script)
        return max(1, int(match[1]) // ranks) if match and ranks else None

    def walltime(self, script: ScriptOptions) -> tuple[int, str] | None:
        return _last_resource(script, "walltime")

    def find_allocation(self, environ: Mapping[str, str]) -> Allocation | None:
        if "PBS_NODEFILE" not in environ:
            return None
        path = Path(environ["PBS_NODEFILE"])
        try:
            lines = path.read_text(encoding="utf-8").split()
        except (OSError, UnicodeDecodeError) as error:
            raise RequestError(
                f"PBS_NODEFILE={path} cannot be read ({error}). Run ddp-hpc launch on the job's first node, "
                "in its script or in the shell of qsub -I."
            ) from None
        if not lines:
            raise RequestError(f"PBS_NODEFILE={path} contains no host names. Submit the job again.")
        # The node file repeats the name of a node `mpiprocs` times.
        repeats = Counter(lines)
        return Allocation(
            scheduler=self.name,
            job_id=environ.get("PBS_JOBID", "?"),
            num_nodes=len(repeats),
            tasks_per_node=min(repeats.values()) if len(lines) > len(repeats) else 0,
        )

    def names_account(self, script: ScriptOptions) -> bool:
        return super().names_account(script) or any(
            one.flag == "-W" and "group_list=" in one.value for one in script.read()
        )

    def read_end_s(self, job_id: str, ask: Callable[..., str]) -> tuple[float, str] | None:
        answer = ask("qstat", "-f", "-F", "json", job_id)
        try:
            [attributes] = json.loads(answer)["Jobs"].values()
            walltime_s = parse_walltime_s(str(attributes["Resource_List"]["walltime"]))
            start_s = time.mktime(time.strptime(attributes["stime"], "%a %b %d %H:%M:%S %Y"))
        except (ValueError, KeyError, TypeError, AttributeError, RequestError):
            return None
        return start_s + walltime_s, "qstat"

    def running_job(self, environ: Mapping[str, str]) -> RunningJob:
        from ddp_hpc.schedulers.pbs.running_job import PbsJob

        return PbsJob(self.job_id(environ), environ)


SCHEDULER = Pbs()


def profile_variables(site: Site) -> str:
    """Returns the variables in the `-v` options of the profile, as `A=1,B=2`.

    The option -v of qsub replaces the -v in a directive, so it must repeat these variables.
    """
    return ",".join(re.findall(r"(?:^| )-v *(\S+)", " ".join(site.pbs.options)))


def _last_resource(script: ScriptOptions, name: str) -> tuple[int, str] | None:
    """Returns the line number and the value of the last `-l NAME=VALUE`; None if there is none."""
    found = [(one.line, value) for one, resource, value in script.resources() if resource == name]
    return found[-1] if found else None


def _one_chunk(script: ScriptOptions, num_nodes: int) -> str:
    """Returns the resources of the script's chunks, such as `:ncpus=4:ngpus=4`.

    Raises:
        RequestError: the script does not request identical chunks.
    """
    select = _last_resource(script, "select")
    if select is None or "+" in select[1]:
        raise RequestError(
            f"--nodes {num_nodes} was given, but the script does not request its nodes as a single chunk, "
            "such as -l select=2:ncpus=4; change the directives of the script"
        )
    count, colon, rest = select[1].partition(":")
    return colon + rest if count.isdecimal() else f":{select[1]}"


def _only_chunk(script: ScriptOptions) -> tuple[int, dict[str, str]] | None:
    """Returns the number of chunks in `select` and the resources of each; None if they differ."""
    select = _last_resource(script, "select")
    if select is None or "+" in select[1]:
        return None
    count, *parts = select[1].split(":")
    if not count.isdecimal():
        count, parts = "1", [count, *parts]
    return int(count[:9]), dict(part.partition("=")[::2] for part in parts)


def _in_chunk(script: ScriptOptions, name: str) -> int | None:
    chunk = _only_chunk(script)
    return whole_number(chunk[1].get(name)) if chunk else None
