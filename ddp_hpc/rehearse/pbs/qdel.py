"""Stand-in for `qdel JOB...`: ends running jobs with SIGTERM, and SIGKILL later; removes waiting jobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ddp_hpc.rehearse import jobs
from ddp_hpc.rehearse.pbs import server


def main(argv: Sequence[str], _environ: Mapping[str, str], root: Path) -> None:
    """Ends the jobs.

    Raises:
        RefusedError: a job is unknown or has already finished.
    """
    for word in argv:
        number = server.job_number("qdel", word, root)
        with jobs.locked(root / "schedule.lock"):
            job = jobs.load(root, number)
            server.refuse_finished("qdel", number, job)
            _delete(root, number, job)
    server.schedule(root)


def _delete(root: Path, number: int, job: jobs.Attributes) -> None:
    if not job["_started"]:
        # The job never ran, so it has neither Exit_status nor stime.
        jobs.change(root, number, job_state="F", substate=91)
        return
    jobs.delete_request(root, number).touch()
    if "comment" in job and "terminated" not in job["comment"]:  # the job can run until kill_delay is over
        by = f"{server.USER}@{job['server']}"
        jobs.change(root, number, comment=f"{job['comment']} and terminated by {by}")
