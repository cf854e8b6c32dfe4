"""The simulated LSF cluster: its settings, and the start of jobs in the order of their dependencies."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ddp_hpc.rehearse import jobs
from ddp_hpc.rehearse import settings as common

OVER = ("DONE", "EXIT")
HELD = "The stand-in runs no more jobs"
DEPENDENCY = "Job dependency condition not satisfied"
# Commands of LSF exit with 255 if they refuse a request.
REFUSED = 255


@dataclass(frozen=True, kw_only=True)
class Settings(common.Settings):
    """The settings of the cluster. `kill_delay_s` is JOB_TERMINATE_INTERVAL of lsb.params."""

    cluster: str = "rehearsal"
    launch_node: str = "batch1"
    queue: str = "normal"
    # The time between SIGUSR2 and the end of a job at its run limit: ten minutes on a real cluster (bsub -W).
    grace_s: float = 10.0
    is_sequential: bool = False  # LSB_USE_SEQUENTIAL_SIGNAL of lsf.conf


def schedule(root: Path) -> None:
    """Starts the jobs whose dependencies are satisfied; jobs beyond `max_jobs` stay pending."""
    max_jobs = Settings.read(root).max_jobs
    for number in jobs.numbers(root):
        job = jobs.load(root, number)
        if job["stat"] != "PEND" or job["is_started"] or job["pend_reason"] == HELD:
            continue
        before = job["after"] and jobs.load(root, job["after"])
        if before and not _is_satisfied(job["condition"], before["stat"]):
            continue
        started = sum(jobs.load(root, one)["is_started"] for one in jobs.numbers(root))
        if max_jobs and started >= max_jobs:
            jobs.change(root, number, pend_reason=HELD)
            continue
        jobs.change(root, number, is_started=True, pend_reason="")
        jobs.start_daemon(root, "ddp_hpc.schedulers.lsf.stand_in.sbatchd", number)


def output_path(number: int, job: jobs.Attributes) -> Path:
    """Returns the file of -o. %J is the ID of the job, and %I its index in the array, or 0 (bsub -o)."""
    name = job["output"].replace("%J", str(number)).replace("%I", str(job.get("array_index", 0)))
    return Path(job["cwd"], name)


def _is_satisfied(condition: str, stat: str) -> bool:
    return stat in {"ended": OVER, "done": ("DONE",), "exit": ("EXIT",)}[condition]
