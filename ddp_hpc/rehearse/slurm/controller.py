"""Stand-in for slurmctld: its settings, the start of jobs, and the processes of their steps."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from ddp_hpc.base.process_control import Process
from ddp_hpc.rehearse import jobs
from ddp_hpc.rehearse import settings as common
from ddp_hpc.rehearse.launchers.start_ranks import processes_of
from ddp_hpc.schedulers.versions import is_between

OVER = ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED")
HELD = "JobHeldAdmin"
NEWEST = "26.05.3"
# The variables of jobs and steps that Slurm 22.05 does not set, with the first version that does.
_VARIABLES_SINCE = {
    "SLURM_JOB_END_TIME": "23.02",
    "SLURM_JOB_GROUP": "23.02",
    "SLURM_JOB_START_TIME": "23.02",
    "SLURM_TRES_PER_TASK": "24.05",
    "SLURM_OOM_KILL_STEP": "24.11",
    "SLURMD_DEBUG": "26.05",
    "SLURM_JOB_EXCLUSIVE": "26.05",
    "SLURM_JOB_OVERSUBSCRIBE": "26.05",
    "SLURM_JOB_SLUID": "26.05",
}


@dataclass(frozen=True, kw_only=True)
class Settings(common.Settings):
    """The settings that slurm.conf contains on a real machine. `kill_delay_s` is KillWait."""

    cluster: str = "rehearsal"
    partition: str = "batch"
    kill_delay_s: float = 30.0

    @property
    def version_line(self) -> str:
        """What sbatch and srun print for --version."""
        return f"slurm {self.version or NEWEST}\n"

    def is_since(self, version: str) -> bool:
        """Returns whether this machine has the given version of Slurm or a later one."""
        return is_between(self.version or NEWEST, version, "")


def schedule(root: Path) -> None:
    """Starts jobs that can run, and holds the jobs beyond `max_jobs`."""
    for number in jobs.numbers(root):
        job = jobs.load(root, number)
        waits = [before for before in job["after"] if jobs.load(root, before)["state"] not in OVER]
        if job["state"] != "PENDING" or job["reason"] == HELD or job["runs"] or waits:
            continue
        if may_run(root):
            jobs.save(root, number, {**job, "state": "CONFIGURING", "reason": "None"})
            jobs.start_daemon(root, "ddp_hpc.rehearse.slurm.stepd", number)
        else:
            jobs.save(root, number, {**job, "reason": HELD})


def may_run(root: Path) -> bool:
    """Returns whether fewer than `max_jobs` jobs have been started."""
    max_jobs = Settings.read(root).max_jobs
    num_runs = sum(jobs.load(root, number)["runs"] for number in jobs.numbers(root))
    return not max_jobs or num_runs < max_jobs


def known_variables(settings: Settings, variables: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that this version of Slurm sets."""
    return {
        name: value
        for name, value in variables.items()
        if settings.is_since(_VARIABLES_SINCE.get(name, "22.05"))
    }


def of_stepd(settings: Settings, text: str) -> str:
    """Returns a line of slurmstepd in the log of a job: since 25.05 with a time, as in its own log."""
    now_s = time.time()
    when = f"{_time_text(now_s)}.{int(now_s * 1000) % 1000:03d}"
    return f"[{when}] error: {text}\n" if settings.is_since("25.05") else f"slurmstepd: error: {text}\n"


def cancelled(settings: Settings, what: str, node: str, why: str) -> str:
    """Returns the line of slurmstepd about the end of a job or step.

    `why` is `TIME LIMIT`, `JOB REQUEUE`, `TASK FAILURE`, or empty after scancel.
    """
    reason = f" DUE TO {why}" if why else ""
    if settings.is_since("25.05"):
        reason = reason or " DUE to SIGNAL Terminated"
    elif why == "TASK FAILURE":
        reason = ""
    return of_stepd(settings, f"*** {what} ON {node} CANCELLED AT {_time_text(time.time())}{reason} ***")


def _time_text(time_s: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time_s))


def sluid(number: int) -> str:
    """Returns the second id that a job has since Slurm 26.05, such as sBQ5M854NPVZ00."""
    digits = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
    return "sDW9M8" + "".join(digits[number >> shift & 31] for shift in range(35, -5, -5))


def steps_directory(root: Path) -> Path:
    """Returns the directory in which each running step has a directory `JOB.STEP.*` with its process ids."""
    path = root / "steps"
    path.mkdir(exist_ok=True)
    return path


def processes_of_steps(root: Path, number: int) -> list[Process]:
    """Returns all processes of the steps of a job: Slurm signals all of them, not only the tasks."""
    return processes_of(steps_directory(root).glob(f"{number}.*"))


def hostlist(nodes: Sequence[str]) -> str:
    """Returns the nodes in Slurm's notation, such as `node[1-2]`. Their numbers must be consecutive."""
    stem = nodes[0].rstrip("0123456789")
    numbers = [node.removeprefix(stem) for node in nodes]
    return nodes[0] if len(nodes) == 1 else f"{stem}[{numbers[0]}-{numbers[-1]}]"


def run_lengths(counts: Sequence[int]) -> str:
    """Returns the counts per node in Slurm's notation, such as `2(x2),1`."""
    groups = [(value, len(list(group))) for value, group in groupby(counts)]
    return ",".join(f"{value}(x{times})" if times > 1 else str(value) for value, times in groups)
