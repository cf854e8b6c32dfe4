"""`qdel JOB...`: SIGTERM to a running job, and SIGKILL after kill_delay; the end of a job that waits."""

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
        RefusedError: unknown or finished already.
    """
    root = server.folder()
    for word in argv:
        number = server.job_number("qdel", word, root)
        job = jobs.load(root, number)
        if job["job_state"] == "F":
            raise RefusedError(f"qdel: Job has finished {number}.{job['server']}", server.FINISHED)
        jobs.delete_request(root, number).touch()
        waits = "comment" in job or "depend" in job
        if waits and job["job_state"] in "QH":
            # It never ran: no Exit_status, no stime.
            jobs.save(root, number, {**job, "job_state": "F", "substate": 91})
            server.release(root)


def main() -> NoReturn:
    """The installed command."""
    server.run(delete, sys.argv[1:], os.environ)
