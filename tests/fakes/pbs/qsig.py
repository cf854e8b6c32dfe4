"""`qsig [-s SIGNAL] JOB`: a signal to every process of the job's session, its login shell too."""

from __future__ import annotations

import getopt
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from tests.fakes.pbs import mom, server
from tests.fakes.pbs.server import Refused


def send(argv: Sequence[str], environ: Mapping[str, str]) -> None:
    """Signals the job.

    Raises:
        Refused: unknown, or not running.
    """
    options, words = getopt.getopt(list(argv), "s:")
    root = server.folder()
    number = server.job_number("qsig", words[0], root)
    job = server.load(root, number)
    if job["job_state"] != "R":
        raise Refused(f"qsig: Request invalid for state of job {number}.{job['server']}", 15018 % 256)
    name = dict(options).get("-s", "TERM").removeprefix("SIG")
    session = [process for process in mom.processes() if process.session == job["session_id"]]
    mom.send(signal.Signals[f"SIG{name}"], session)


def main() -> NoReturn:
    server.run(send, sys.argv[1:], os.environ)
