"""`qsig [-s SIGNAL] JOB`: signal all processes of the job's session, including the login shell."""

from __future__ import annotations

import getopt
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from ddp_hpc.rehearse import jobs, processes
from ddp_hpc.rehearse.launchers.options import RefusedError
from ddp_hpc.rehearse.pbs import server


def send(argv: Sequence[str], _environ: Mapping[str, str]) -> None:
    """Signals the job.

    Raises:
        RefusedError: the job is unknown or not running.
    """
    try:
        options, words = getopt.getopt(list(argv), "s:")
    except getopt.GetoptError:
        options, words = [], []
    if not words:
        raise RefusedError("usage: qsig [-s signal] job_identifier...\n       qsig --version", 2)
    root = server.directory()
    number = server.job_number("qsig", words[0], root)
    job = jobs.load(root, number)
    if job["job_state"] == "F":
        raise RefusedError(f"qsig: Job has finished {number}.{job['server']}", server.FINISHED)
    if job["job_state"] != "R":
        text = f"qsig: Request invalid for state of job {number}.{job['server']}"
        raise RefusedError(text, server.BAD_STATE)
    name = dict(options).get("-s", "TERM").removeprefix("SIG")
    processes.send(signal.Signals[f"SIG{name}"], processes.of_session(job["session_id"]))


def main() -> NoReturn:
    """The entry point of the installed command."""
    server.run(send, sys.argv[1:], os.environ)
