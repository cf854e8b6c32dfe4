"""Stand-in for `qdel JOB...`: ends running jobs with SIGTERM, and SIGKILL later; removes waiting jobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ddp_hpc.rehearse import jobs
from ddp_hpc.schedulers.pbs.stand_in import server


def main(argv: Sequence[str], _environ: Mapping[str, str], root: Path) -> None:
    """Ends the jobs.

    Raises:
        RefusedError: a job is unknown or has already finished.
    """
    server.check_running("qdel", root)
    for word in argv:
        number = server.job_number("qdel", word, root)
        job = jobs.load(root, number)
        if "_indices" in job:
            for index in job["_indices"]:
                jobs.delete_request(root, server.subjob(number, index)).touch()
            continue
        server.refuse_finished("qdel", number, job)
        jobs.delete_request(root, number).touch()
        by = f"{server.USER}@{server.Settings.read(root).submit_host}"
        comment = {"comment": f"{job['comment']} and terminated by {by}"} if "comment" in job else {}
        if job["job_state"] == "H" or (comment and job["job_state"] == "Q"):
            # The job never ran, so it has neither Exit_status nor stime.
            jobs.change(root, number, **comment, job_state="F", substate=91)
            server.release(root)
        elif comment and "terminated" not in job["comment"]:
            jobs.change(root, number, **comment)  # the job can run until kill_delay is over
