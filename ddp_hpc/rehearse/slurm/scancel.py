"""Stand-in for `scancel [--signal=NAME] JOB...`: cancels jobs, or signals the processes of their steps."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

from ddp_hpc.base import process_control
from ddp_hpc.rehearse import jobs
from ddp_hpc.rehearse.launchers.options import RefusedError, Table, read_line, spellings
from ddp_hpc.rehearse.slurm import controller

_TABLE = Table(
    program="scancel", values=spellings("signal:s"), bare=spellings("quiet:Q verbose:v"), long_only=False
)


def main(argv: Sequence[str], _environ: Mapping[str, str], root: Path) -> int:
    """Signals or cancels the jobs.

    Raises:
        RefusedError: an option, job or signal is unknown.
    """
    line = read_line(argv, _TABLE)
    name = line.values.get("signal", "").removeprefix("SIG").upper()
    if name and not (name.isdecimal() or f"SIG{name}" in signal.Signals.__members__):
        raise RefusedError(f"Unknown job signal: {name}")
    for word in line.command:
        # Without --verbose, scancel ignores unknown jobs and jobs that have ended.
        if word.isdecimal() and not jobs.job_file(root, int(word)).exists():
            continue
        number = jobs.find_job(word, root, f"scancel: error: Invalid job id {word}")
        job = jobs.load(root, number)
        if job["state"] in controller.OVER:
            continue
        if name:
            wanted = int(name) if name.isdecimal() else signal.Signals[f"SIG{name}"].value
            process_control.send(wanted, controller.processes_of_steps(root, number))
        elif job["state"] == "PENDING":
            jobs.save(root, number, {**job, "state": "CANCELLED"})
        else:
            jobs.delete_request(root, number).touch()
    return 0
