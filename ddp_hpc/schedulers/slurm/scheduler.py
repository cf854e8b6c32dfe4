"""Support for Slurm: directives of job scripts, variables for launchers, and allocations of running jobs."""

from __future__ import annotations

import re
import shlex
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from ddp_hpc.errors import RequestError
from ddp_hpc.request.job import Job
from ddp_hpc.request.rank_layout import Layout
from ddp_hpc.request.raw_options import raw_directive
from ddp_hpc.schedulers.allocation import Allocation, first_number, smallest_count
from ddp_hpc.schedulers.base import (
    Directives,
    Overrides,
    ReadOption,
    Scheduler,
    ScriptOptions,
    cpus_per_task,
    last_directive,
    optional_value,
    refuse_unused,
    whole_number,
)
from ddp_hpc.schedulers.slurm.check_option_values import is_time, time_s
from ddp_hpc.schedulers.slurm.parse_directives import read_options
from ddp_hpc.schedulers.slurm.submit_options import submit_options
from ddp_hpc.schedulers.versions import is_between
from ddp_hpc.sites.site import Site
from ddp_hpc.units import format_walltime, parse_walltime_s

if TYPE_CHECKING:
    from ddp_hpc.schedulers.device_share import DeviceShare
    from ddp_hpc.schedulers.machine_facts import MachineFacts, Question
    from ddp_hpc.schedulers.running_job import RunningJob

_VERSION_LIMIT_S = 5
_KILL_WAIT = re.compile(r"^KillWait\s*=\s*([0-9]{1,6}) sec", re.MULTILINE)


class Slurm(Scheduler):
    """The Slurm scheduler. KillWait, the time from SIGTERM to SIGKILL, is 30 s by default (slurm.conf.5)."""

    name = "slurm"
    title = "Slurm"
    template = "slurm.sh.j2"
    submit_program = "sbatch"
    launchers = ("srun", "mpiexec", "ibrun", "torchrun")
    can_requeue = True
    kill_delay_s = 30
    first_node_in_shell = '$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)'
    job_number_in_shell = "SLURM_JOB_ID"
    agent_launcher = "srun"
    passes_arguments = True
    passes_environment = True
    interactive_command = "salloc"
    prefix = "#SBATCH"
    # sbatch does not require a blank after the prefix, and all versions also read #SLURM.
    directive_pattern = re.compile(r"#(?:SBATCH|SLURM)(.*)", re.DOTALL)
    log_flags = ("--output", "--error")
    walltime_flag = "--time"
    walltime_directive = "#SBATCH --time=HH:MM:SS"
    bare_walltime_unit_s = 60
    account_flags = ("--account",)
    name_flags = frozenset(("--mail-user", "--job-name"))
    zero_is_refused = False
    job_id_variable = "SLURM_JOB_ID"
    start_variable = "SLURM_RESTART_COUNT"
    end_time_variable = "SLURM_JOB_END_TIME"
    array_index_variables = ("SLURM_ARRAY_TASK_ID",)
    commands = ("sbatch", "srun", "squeue", "scancel", "scontrol")
    start_without_ssh = "use --launcher srun, which needs no ssh"
    query_command = "scontrol"
    job_id_pattern = re.compile("[_@]|^s")

    def directives(self, job: Job, site: Site, layout: Layout) -> Directives:
        refuse_unused(site, [("--filesystems", job.filesystems)])
        if not site.slurm.queue_option:
            refuse_unused(site, [("--queue", job.queue)])
        # With torchrun, one agent per node is the task; otherwise each rank is a task.
        per_node = 1 if layout.launcher == "torchrun" else layout.ranks_per_node
        return {
            **super().directives(job, site, layout),
            "nodes": str(job.num_nodes),
            "tasks_per_node": str(per_node),
            "cpus_per_task": str(cpus_per_task(layout)),
            "gpus": _gpu_option(site, layout),
            "queue_option": site.slurm.queue_option,
            **({} if site.slurm.queue_option else {"queue": ""}),
            "qos": optional_value("QOS", layout.queue.qos),
            # job.constraint has been checked already. It may contain brackets, which optional_value rejects.
            "constraint": job.constraint or optional_value("constraint", site.slurm.constraint),
            "options": [*site.slurm.options, *([f"--mem={layout.memory_mib}M"] if layout.memory_mib else [])],
        }

    def submit_options(self, job: Job, site: Site, layout: Layout) -> list[str]:
        found = submit_options(job)
        given = [*found, *(raw_directive(text)[1] for text in job.directive)]
        for name in (name for option in given for name in self.option_names(option)):
            if name in site.slurm.forbidden:
                raise RequestError(f"{name} was given, but {site.title} does not accept it. Remove {name}.")
        return found

    def device_share(self, queue: str, gpus_per_node: int) -> DeviceShare | None:
        from ddp_hpc.schedulers.slurm import ask_nodes

        return ask_nodes.device_share(queue, gpus_per_node)

    def questions(self) -> tuple[Question, ...]:
        from ddp_hpc.schedulers.slurm.ask_machine import QUESTIONS

        return QUESTIONS

    def read_answers(self, answers: Mapping[str, str], site: Site) -> MachineFacts:
        from ddp_hpc.schedulers.slurm import ask_machine

        return ask_machine.read_answers(answers, site)

    def refuse_qos(self, site: Site) -> str:
        if site.slurm.queue_option == "qos":
            return f"at {site.title}, --queue sets the QOS"
        if "--qos" in site.slurm.forbidden:
            return f"{site.title} does not accept it"
        return ""

    def version_of(self, site: Site) -> str:
        return site.slurm.version

    def installed_version(self) -> str:
        from ddp_hpc.schedulers.slurm.ask_machine import version_in

        try:
            done = subprocess.run(
                ["sbatch", "--version"],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_VERSION_LIMIT_S,
            )
        except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
            return ""
        return version_in(done.stdout) if done.returncode == 0 else ""

    def repeatable_flags_in(self, version: str) -> frozenset[str]:
        # Since 25.05, the last --mail-type counts; before, all of them did (src/common/slurm_opt.c).
        adds_mail_types = not version or not is_between(version, "25.05", "")
        return frozenset(
            ("--mail-type", "--verbose", "--quiet") if adds_mail_types else ("--verbose", "--quiet")
        )

    def account_placeholder(self, site: Site) -> str:
        return "-A PROJECT"

    def account_flag(self, site: Site) -> str:
        return "--account"

    def account_arguments(self, account: str, option: str) -> list[str]:
        return [f"--account={account}"]

    def submit_argv(
        self, script: str, options: Sequence[str], after: str = "", variables: str = ""
    ) -> list[str]:
        return ["sbatch", "--parsable", *options, script]

    def overrides(self, asked: Overrides, script: ScriptOptions, site: Site | None) -> list[list[str]]:
        queue_option = (site.slurm.queue_option if site else "") or "partition"
        found = {
            "nodes": str(asked.num_nodes or ""),
            "time": format_walltime(asked.walltime_s) if asked.walltime_s else "",
            queue_option: asked.queue,
            "job-name": asked.name,
        }
        if asked.qos:
            found["qos"] = asked.qos
        return [[f"--{name}={value}"] for name, value in found.items() if value]

    def mpiexec_variables(self, cpus_per_task: int, ranks_per_node: int) -> list[tuple[str, str, str]]:
        why_cpus = (
            "mpiexec starts one process per node with srun, which would bind all ranks to one task's CPUs."
        )
        why_mpi = "If pmix is the default of srun, MPICH would find two process managers and abort."
        return [
            ("SRUN_CPUS_PER_TASK", str(cpus_per_task * ranks_per_node), why_cpus),
            ("SLURM_CPU_BIND", "none", ""),
            ("SLURM_MPI_TYPE", "none", why_mpi),
        ]

    def exclude_host(self, host: str) -> str:
        return f"sbatch --exclude={host}"

    def read_directives(self, lines: Sequence[tuple[int, str]]) -> Iterator[ReadOption]:
        yield from read_options(lines)

    def split_options(self, words: Sequence[str]) -> Iterator[tuple[str, str]]:
        for option in read_options([(1, shlex.join(words))]):
            yield option.flag, option.value

    def accepts_walltime(self, text: str) -> bool:
        return is_time(text)

    def walltime_s(self, text: str) -> int | None:
        return time_s(text)

    def num_nodes(self, script: ScriptOptions) -> int | None:
        return whole_number(script.value("--nodes"))

    def ranks_per_node(self, script: ScriptOptions) -> int | None:
        return whole_number(script.value("--ntasks-per-node"))

    def gpus_per_node(self, script: ScriptOptions) -> int | None:
        for value in (script.value("--gpus-per-node"), _gres_gpus(script.value("--gres"))):
            if value is not None:
                return whole_number(value.rpartition(":")[2])
        return None

    def cpus_per_rank(self, script: ScriptOptions) -> int | None:
        return whole_number(script.value("--cpus-per-task"))

    def queue(self, script: ScriptOptions, site: Site | None) -> tuple[int, str] | None:
        return last_directive(script, f"--{site.slurm.queue_option if site else 'partition'}")

    def qos(self, script: ScriptOptions, site: Site | None) -> str:
        is_queue = site is not None and site.slurm.queue_option == "qos"
        return "" if is_queue else script.value("--qos") or ""

    def find_allocation(self, environ: Mapping[str, str]) -> Allocation | None:
        if "SLURM_JOB_ID" not in environ:
            return None
        text = environ.get("SLURM_JOB_NUM_NODES") or environ.get("SLURM_NNODES", "")
        if not first_number(text):
            raise RequestError(
                f"SLURM_JOB_ID is set, but SLURM_JOB_NUM_NODES is {text[:40]!r}; it must be the number of "
                "nodes. Run ddp-hpc launch in the shell of sbatch or salloc, or unset SLURM_JOB_ID."
            )
        # Every job has SLURM_TASKS_PER_NODE, but it is the number of CPUs if no tasks were requested.
        requested = "SLURM_NTASKS" in environ
        return Allocation(
            scheduler=self.name,
            job_id=environ["SLURM_JOB_ID"],
            num_nodes=first_number(text),
            tasks_per_node=smallest_count(environ.get("SLURM_TASKS_PER_NODE", "")) if requested else 0,
            cpus_per_node=smallest_count(environ.get("SLURM_JOB_CPUS_PER_NODE", "")),
            # The shell of salloc has only SLURM_GPUS_PER_NODE, whose value is `4` or `a100:4`, as requested.
            gpus_per_node=first_number(environ.get("SLURM_GPUS_ON_NODE", ""))
            or first_number(environ.get("SLURM_GPUS_PER_NODE", "").rpartition(":")[2]),
        )

    def read_end_s(self, job_id: str, ask: Callable[..., str]) -> tuple[float, str] | None:
        # %L is the remaining walltime, [D-]HH:MM:SS; the end time (%e) would be in an unknown time zone.
        left = ask("squeue", "--noheader", f"--jobs={job_id}", "--format=%L").strip()
        hours = left if left.count(":") == 2 else f"0:{left}"  # hours are omitted below one hour
        try:
            return time.time() + parse_walltime_s(hours), "squeue"
        except RequestError:
            return None

    def read_kill_delay_s(self, ask: Callable[..., str]) -> int | None:
        found = _KILL_WAIT.search(ask("scontrol", "show", "config"))
        return int(found[1]) if found else None

    def array_options(self, index: str) -> list[str]:
        return [f"--array={index}"]

    def job_id(self, environ: Mapping[str, str]) -> str:
        # The SLURM_JOB_ID of one task of each array is the ID of the whole array: `scontrol requeue` and
        # `scancel` with this ID would affect all tasks.
        array, index = environ.get("SLURM_ARRAY_JOB_ID"), self.array_index(environ)
        return f"{array}_{index}" if array and index else super().job_id(environ)

    def running_job(self, environ: Mapping[str, str]) -> RunningJob:
        from ddp_hpc.schedulers.slurm.running_job import SlurmJob

        return SlurmJob(self.job_id(environ), environ)


SCHEDULER = Slurm()


def _gpu_option(site: Site, layout: Layout) -> str:
    """Returns the option that requests GPUs; empty if jobs get all GPUs of their nodes without it."""
    option = site.slurm.gpu_option
    if not layout.devices or not option:
        return ""
    named = f"{site.slurm.gpu_type}:{layout.devices}" if site.slurm.gpu_type else str(layout.devices)
    return f"--gres=gpu:{named}" if option == "gres" else f"--gpus-per-node={named}"


def _gres_gpus(gres: str | None) -> str | None:
    """Returns the GPUs in the value of --gres, such as `gpu:a100:4`; 1 for `gpu` alone."""
    for part in (gres or "").split(","):
        name = part.removeprefix("gres/").removeprefix("gres:")
        if name == "gpu":
            return "1"
        if name.startswith("gpu:"):
            return name.partition("(")[0]
    return None
