"""`qhold JOB`: place a user hold. A running job continues, but gets a comment about the hold."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import NoReturn

from ddp_hpc.rehearse import jobs
from ddp_hpc.rehearse.launchers.options import RefusedError
from ddp_hpc.rehearse.pbs import server


def hold(argv: Sequence[str], _environ: Mapping[str, str]) -> None:
    """Holds the job.

    Raises:
        RefusedError: the job is unknown or has finished.
    """
    root = server.directory()
    number = server.job_number("qhold", argv[-1] if argv else "", root)
    job = jobs.load(root, number)
    if job["job_state"] == "F":
        raise RefusedError(f"qhold: Job has finished {number}.{job['server']}", server.FINISHED)
    state: dict[str, object] = {} if job["job_state"] == "R" else {"job_state": "H", "substate": 20}
    types = "".join(sorted({*job["Hold_Types"].replace("n", ""), "u"}))
    comment = f"Job held by {server.USER} on {time.ctime()}"
    jobs.change(root, number, **state, Hold_Types=types, comment=comment)


def main() -> NoReturn:
    """The entry point of the installed command."""
    server.run(hold, sys.argv[1:], os.environ)
