"""Support for PBS Professional and OpenPBS: directives, and the requests of scripts."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from ddp_hpc.errors import RequestError
from ddp_hpc.request.job import Job
from ddp_hpc.request.rank_layout import Layout
from ddp_hpc.schedulers.allocation import Allocation
from ddp_hpc.schedulers.base import (
    Directives,
    JobCommands,
    Scheduler,
    ScriptOptions,
    directive_value,
    optional_value,
    resource_values,
    walltime_of,
    whole_number,
)
from ddp_hpc.sites.site import Site
from ddp_hpc.units import parse_walltime_s

# Older servers truncate or reject longer names.
MAX_NAME_CHARS = 15

# Options of qsub without a value (qsub.1B).
_BARE = frozenset("VXIhfz")


class Pbs(Scheduler):
    """PBS. kill_delay, the time from SIGTERM to SIGKILL, is 10 s by default (pbs_server_attributes.7B)."""

    name = "pbs"
    title = "PBS"
    template = "pbs.sh.j2"
    submit_program = "qsub"
    launchers = ("mpiexec", "torchrun")
    can_requeue = True
    kill_delay_s = 10
    job_id_in_shell = "${PBS_JOBID:-none}"
    agent_launcher = "mpiexec"
    why_omp_num_threads = "PBS sets this to the number of cores of the whole node."
    interactive_command = "qsub -I"
    can_chain = True
    requests_by_resources = True
    prefix = "#PBS"
    log_flags = ("-o", "-e")
    job_id_variable = "PBS_JOBID"
    commands = ("qsub", "qstat", "qdel")
    walltime_directive = "#PBS -l walltime=HH:MM:SS"
    walltime_pattern = re.compile(r"\d{1,9}|\d{1,9}:\d{1,2}|\d{1,6}:\d{1,2}:\d{1,2}(?:\.\d+)?")

    def directives(self, job: Job, site: Site, layout: Layout) -> Directives:
        if len(job.name) > MAX_NAME_CHARS:
            raise RequestError(
                f"job name {job.name!r} has {len(job.name)} characters, but PBS accepts at most "
                f"{MAX_NAME_CHARS}. Use a shorter name."
            )
        return {
            "name": directive_value("job name", job.name),
            "resources": resource_values(job, site, layout, site.pbs.resources),
            "walltime": walltime_of(layout, site),
            "filesystems_resource": site.pbs.filesystems_resource,
            "filesystems": optional_value("filesystems", job.filesystems or site.pbs.filesystems),
            "queue": optional_value("queue", layout.queue),
            "account_option": site.account.option,
            "account": optional_value("account", job.account),
            "options": site.pbs.options,
            "variables": profile_variables(site),
        }

    def submit_argv(
        self, script: str, options: Sequence[str], after: str = "", variables: str = ""
    ) -> list[str]:
        chain = ["-W", f"depend=afterany:{after}"] if after else []
        return ["qsub", *options, *chain, *(["-v", variables] if variables else []), script]

    def split_options(self, words: Sequence[str]) -> Iterator[tuple[str, str]]:
        index = 0
        while index < len(words):
            word, index = words[index], index + 1
            if word.startswith("#"):
                return  # the rest is a comment; lint reports it separately
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
        selects = [value for _, name, value in script.resources() if name == "select"]
        match = re.search(r":ncpus=(\d{1,6})\b", selects[-1]) if selects else None
        ranks = self.ranks_per_node(script)
        return max(1, int(match[1]) // ranks) if match and ranks else None

    def walltime(self, script: ScriptOptions) -> tuple[int, str] | None:
        times = [(d.line, value) for d, name, value in script.resources() if name == "walltime"]
        return times[-1] if times else None

    def queue(self, script: ScriptOptions, site: Site | None) -> tuple[int, str] | None:
        found = [(d.line, d.value) for d in script.read() if d.flag == "-q"]
        return found[-1] if found else None

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
            raise RequestError(f"PBS_NODEFILE={path} names no node. Start the job again.")
        # The node file contains the name of a node once for each of its mpiprocs.
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

    def job_commands(self) -> JobCommands:
        from ddp_hpc.schedulers.pbs import job_commands

        return JobCommands(
            title=self.title,
            program="qsub",
            asks="qstat",
            job_id_pattern=re.compile(r"[.[]"),
            read_job=job_commands.read_job,
            job_id_of=job_commands.job_id_of,
            cancel=job_commands.cancel,
        )


SCHEDULER = Pbs()


def profile_variables(site: Site) -> str:
    """Returns the variables that the `-v` of the profile passes to a job, as `A=1,B=2`.

    A `-v` on qsub's command line replaces that of the script, so it must repeat them.
    """
    return ",".join(re.findall(r"(?:^| )-v *(\S+)", " ".join(site.pbs.options)))


def _only_chunk(script: ScriptOptions) -> tuple[int, dict[str, str]] | None:
    """Returns the number of nodes and the resources of a `select` with one kind of chunk, or None."""
    selects = [value for _, name, value in script.resources() if name == "select"]
    if not selects or "+" in selects[-1]:
        return None
    count, *parts = selects[-1].split(":")
    if not count.isdecimal():
        count, parts = "1", [count, *parts]
    return int(count[:9]), dict(part.partition("=")[::2] for part in parts)


def _in_chunk(script: ScriptOptions, name: str) -> int | None:
    chunk = _only_chunk(script)
    return whole_number(chunk[1].get(name)) if chunk else None
