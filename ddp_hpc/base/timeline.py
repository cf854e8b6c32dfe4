"""The file `timeline` in the run directory, which says when each part of each attempt began and ended.

It has one JSON object per line: `at_s` (seconds since the Unix epoch), `attempt` (`ATTEMPT JOBID`, the value
of DDP_HPC_THIS_ATTEMPT), `moment`, and numbers and texts that depend on the moment. The supervisor writes it
while the ranks do not run, and rank 0 and the rank that reports a failure while they do. Nothing depends on
it but the report on the cost of the run (`ddp_hpc.queue.run_cost`), so a line that cannot be written is lost.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from enum import StrEnum
from pathlib import Path

from ddp_hpc.base.atomic_files import append_line
from ddp_hpc.base.errors import DdpHpcError

TIMELINE = "timeline"


class Moment(StrEnum):
    """What a line of the file records."""

    JOB_BEGAN = "job began"
    """`num_nodes`: all nodes of the job."""
    LAUNCHER_STARTED = "launcher started"
    """`num_used`: the number of nodes of the ranks, null for all; `records_steps`: whether rank 0 records
    STEPS_BEGAN in any case; `checks_s`: for how long nodes were checked before."""
    PROGRAM_BEGAN = "program began"
    """`ddp-hpc exec` starts the program of rank 0."""
    STEPS_BEGAN = "steps began"
    """The first step begins. `step`: completed steps; `restore_s`: seconds for reading the snapshot."""
    STEPS = "steps"
    """Some steps are complete. `step`: the last one; `loss`: their mean loss, or null if it is not finite;
    `num_steps`, `steps_s`, `data_s`: their number, their duration, and the time of it in which rank 0 waited
    for data."""
    SAVED = "saved"
    """A snapshot is complete. `at_s`: when training continued; `step`; `save_s` and `data_s`: seconds since
    STEPS_BEGAN in which training waited for snapshots and for data until `at_s`."""
    STEPS_ENDED = "steps ended"
    """The training is complete, or has stopped with its state saved; like SAVED."""
    ATTEMPT_ENDED = "attempt ended"
    """The fields of `AttemptEnd`."""
    LAUNCHER_ENDED = "launcher ended"
    """`checkpoint_s`: when a program that writes no `state` saved its last checkpoint, if it did."""
    NOT_RESTARTED = "not restarted"
    """`reason`: why the job does not start the ranks again after a failure."""
    JOB_ENDED = "job ended"


def note(
    run_dir: Path, attempt: str, moment: Moment, *, at_s: float | None = None, **details: object
) -> None:
    """Appends a line, by default with the current time. A line that cannot be written is lost."""
    line = {"at_s": round(time.time() if at_s is None else at_s, 3), "attempt": attempt, "moment": moment}
    with suppress(DdpHpcError):
        append_line(run_dir / TIMELINE, json.dumps(line | details).encode())
