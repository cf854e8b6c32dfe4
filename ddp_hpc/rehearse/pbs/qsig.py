"""Stand-in for `qsig [-s SIGNAL] JOB`: signals all processes of the job's session and its login shell."""

from __future__ import annotations

import getopt
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

from ddp_hpc.base import process_control
from ddp_hpc.rehearse import jobs
from ddp_hpc.rehearse.launchers.options import RefusedError
from ddp_hpc.rehearse.pbs import server


def main(argv: Sequence[str], _environ: Mapping[str, str], root: Path) -> None:
    """Sends the signal to the job.

    Raises:
        RefusedError: the job is unknown or not running.
    """
    server.check_running("qsig", root)
    try:
        options, words = getopt.getopt(list(argv), "s:")
    except getopt.GetoptError:
        options, words = [], []
    if not words:
        raise RefusedError("usage: qsig [-s signal] job_identifier...\n       qsig --version", 2)
    number = server.job_number("qsig", words[0], root)
    job = jobs.load(root, number)
    server.refuse_finished("qsig", number, job)
    if job["job_state"] != "R":
        text = f"qsig: Request invalid for state of job {number}.{job['server']}"
        raise RefusedError(text, server.BAD_STATE)
    name = dict(options).get("-s", "TERM").removeprefix("SIG")
    process_control.send(signal.Signals[f"SIG{name}"], process_control.of_session(job["session_id"]))
