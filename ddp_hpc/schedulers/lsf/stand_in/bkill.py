"""Stand-in for `bkill [-s SIGNAL] JOB...`: ends jobs, or signals their processes."""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ddp_hpc.rehearse import jobs
from ddp_hpc.rehearse.launchers.options import RefusedError
from ddp_hpc.schedulers.lsf.stand_in import cluster
from ddp_hpc.schedulers.lsf.stand_in.cluster import REFUSED


def main(argv: Sequence[str], _environ: Mapping[str, str], root: Path) -> int:
    """Ends the jobs, or sends them a signal.

    Raises:
        RefusedError: a job or signal is unknown, or a job has ended.
    """
    words, name = list(argv), ""
    if words[:1] == ["-s"]:
        name, words = words[1].upper().removeprefix("SIG"), words[2:]
        if f"SIG{name}" not in signal.Signals.__members__:
            raise RefusedError(f"{name}: Illegal signal value", REFUSED)
    for word in words:
        number = jobs.find_job(word, root, f"Job <{word}>: No matching job found", REFUSED)
        job = jobs.load(root, number)
        if job["stat"] in cluster.OVER:
            raise RefusedError(f"Job <{word}>: Job has already finished", REFUSED)
        if name and job["stat"] == "RUN":
            jobs.rerun_request(root, number).write_text(str(signal.Signals[f"SIG{name}"].value))
            sys.stdout.write(f"Job <{word}> is being signaled\n")
            continue
        if job["is_started"]:
            jobs.delete_request(root, number).touch()
        else:
            jobs.change(root, number, stat="EXIT", exit_reason="TERM_OWNER: job killed by owner")
        sys.stdout.write(f"Job <{word}> is being terminated\n")
    return 0
