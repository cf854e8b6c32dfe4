"""`qdel JOB...`: end running jobs with SIGTERM, and SIGKILL after kill_delay; remove waiting jobs."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from ddp_hpc.rehearse import jobs
from ddp_hpc.rehearse.launchers.options import RefusedError
from ddp_hpc.rehearse.pbs import server


def delete(argv: Sequence[str], _environ: Mapping[str, str]) -> None:
    """Ends the jobs.

    Raises:
        RefusedError: a job is unknown or has already finished.
    """
    root = server.directory()
    for word in argv:
        number = server.job_number("qdel", word, root)
        job = jobs.load(root, number)
        if "_indices" in job:
            for index in job["_indices"]:
                jobs.delete_request(root, server.subjob(number, index)).touch()
            continue
        if job["job_state"] == "F":
            raise RefusedError(f"qdel: Job has finished {number}.{job['server']}", server.FINISHED)
        jobs.delete_request(root, number).touch()
        by = f"{server.USER}@{server.read_settings(root).submit_host}"
        comment = {"comment": f"{job['comment']} and terminated by {by}"} if "comment" in job else {}
        if job["job_state"] == "H" or (comment and job["job_state"] == "Q"):
            # The job never ran, so it has neither Exit_status nor stime.
            jobs.change(root, number, **comment, job_state="F", substate=91)
            server.release(root)
        elif comment and "terminated" not in job["comment"]:
            jobs.change(root, number, **comment)  # immediately, while the job still has time to end


def main() -> NoReturn:
    """The entry point of the installed command."""
    server.run(delete, sys.argv[1:], os.environ)
