"""`qdel JOB...`: SIGTERM to a running job, and SIGKILL after kill_delay; the end of a job that waits."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from tests.fakes.pbs import server
from tests.fakes.pbs.server import Refused


def delete(argv: Sequence[str], environ: Mapping[str, str]) -> None:
    """Ends the jobs.

    Raises:
        Refused: unknown or finished already.
    """
    root = server.folder()
    for word in argv:
        number = server.job_number("qdel", word, root)
        job = server.load(root, number)
        if job["job_state"] == "F":
            raise Refused(f"qdel: Job has finished {number}.{job['server']}", server.FINISHED)
        server.delete_request(root, number).touch()
        waits = "comment" in job or "depend" in job
        if waits and job["job_state"] in "QH":
            # It never ran: no Exit_status, no stime.
            server.save(root, number, {**job, "job_state": "F", "substate": 91})
            server.release(root)


def main() -> NoReturn:
    server.run(delete, sys.argv[1:], os.environ)
