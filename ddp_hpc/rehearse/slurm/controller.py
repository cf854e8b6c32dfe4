"""Stand-in for slurmctld: its settings, the start of jobs, and the processes of their steps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from ddp_hpc.base.process_control import Process
from ddp_hpc.rehearse import jobs
from ddp_hpc.rehearse import settings as common
from ddp_hpc.rehearse.launchers.start_ranks import processes_of

OVER = ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED")
HELD = "JobHeldAdmin"
VERSION = "slurm 26.05.3\n"
"""What sbatch and srun print for --version."""


@dataclass(frozen=True, kw_only=True)
class Settings(common.Settings):
    """The settings that slurm.conf contains on a real machine. `kill_delay_s` is KillWait."""

    cluster: str = "rehearsal"
    partition: str = "batch"
    kill_delay_s: float = 30.0


def schedule(root: Path) -> None:
    """Starts jobs that can run, and holds the jobs beyond `max_jobs`. Called whenever a job is submitted or
    ends.
    """
    with jobs.locked(root / "schedule.lock"):
        for number in jobs.numbers(root):
            job = jobs.load(root, number)
            waits = [before for before in job["after"] if jobs.load(root, before)["state"] not in OVER]
            if job["state"] != "PENDING" or job["reason"] == HELD or job["runs"] or waits:
                continue
            if may_run(root):
                jobs.change(root, number, state="CONFIGURING", reason="None")
                jobs.start_daemon(root, "ddp_hpc.rehearse.slurm.stepd", number)
            else:
                jobs.change(root, number, reason=HELD)


def may_run(root: Path) -> bool:
    """Returns whether fewer than `max_jobs` jobs have been started."""
    max_jobs = Settings.read(root).max_jobs
    known = [jobs.load(root, number) for number in jobs.numbers(root)]
    num_runs = sum(job["runs"] + (job["state"] == "CONFIGURING") for job in known)
    return not max_jobs or num_runs < max_jobs


def of_stepd(text: str) -> str:
    """Returns a line of slurmstepd in the log of a job, in the format of Slurm since 25.05."""
    now_s = time.time()
    return f"[{_time_text(now_s)}.{int(now_s * 1000) % 1000:03d}] error: {text}\n"


def cancelled(number: int, node: str, why: str) -> str:
    """Returns the line of slurmstepd about the end of a job.

    `why` is `TIME LIMIT`, `JOB REQUEUE`, or empty after scancel.
    """
    reason = f"DUE TO {why}" if why else "DUE to SIGNAL Terminated"
    return of_stepd(f"*** JOB {number} ON {node} CANCELLED AT {_time_text(time.time())} {reason} ***")


def _time_text(time_s: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time_s))


def steps_directory(root: Path) -> Path:
    """Returns the directory in which each running step has a directory `JOB.STEP.*` with its process ids."""
    path = root / "steps"
    path.mkdir(exist_ok=True)
    return path


def processes_of_steps(root: Path, number: int) -> list[Process]:
    """Returns all processes of the steps of a job: Slurm signals all of them, not only the tasks."""
    return processes_of(steps_directory(root).glob(f"{number}.*/pid.*"))


def hostlist(nodes: Sequence[str]) -> str:
    """Returns the nodes in Slurm's notation, such as `node[1-2]`. Their numbers must be consecutive."""
    stem = nodes[0].rstrip("0123456789")
    numbers = [node.removeprefix(stem) for node in nodes]
    return nodes[0] if len(nodes) == 1 else f"{stem}[{numbers[0]}-{numbers[-1]}]"


def run_lengths(counts: Sequence[int]) -> str:
    """Returns the counts per node in Slurm's notation, such as `2(x2),1`."""
    groups = [(value, len(list(group))) for value, group in groupby(counts)]
    return ",".join(f"{value}(x{times})" if times > 1 else str(value) for value, times in groups)
