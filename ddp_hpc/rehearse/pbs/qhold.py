"""Stand-in for `qhold JOB`: places a user hold. A running job continues, but gets a comment."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from ddp_hpc.rehearse import jobs
from ddp_hpc.rehearse.pbs import server


def main(argv: Sequence[str], _environ: Mapping[str, str], root: Path) -> None:
    """Places the hold.

    Raises:
        RefusedError: the job is unknown or has finished.
    """
    server.check_running("qhold", root)
    number = server.job_number("qhold", argv[-1] if argv else "", root)
    job = jobs.load(root, number)
    server.refuse_finished("qhold", number, job)
    state: dict[str, object] = {} if job["job_state"] == "R" else {"job_state": "H", "substate": 20}
    types = "".join(sorted({*job["Hold_Types"].replace("n", ""), "u"}))
    comment = f"Job held by {server.USER} on {time.ctime()}"
    jobs.change(root, number, **state, Hold_Types=types, comment=comment)
