"""How a program is resumed in another job, from its command, its options and its source code.

The source code is read, never run. `ddp_hpc.job` resumes a program that saves snapshots or checkpoints in one
of the ways that docs/how-to/any-program.md describes. If nothing in a program can do that, its run ends with
the walltime of its job, which the user must know before the job waits in a queue.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from ddp_hpc.base.units import format_walltime
from ddp_hpc.request.program import program_of

Way = Literal["snapshots", "checkpoints", "exit 75", "signal", "unknown", "never"]


class Resumption(NamedTuple):
    """How a program is resumed.

    `way` is "snapshots" or "checkpoints" if the program uses ddp_hpc to save its state or to stop in time,
    "exit 75" if it can exit with this code, "signal" with --requeue on-signal, "never" if another job
    cannot resume it, and "unknown" if the program could not be read. `why` says why it is not resumed.
    `may_restart` is whether the same job starts it again after a failure, because it records checkpoints.
    `missing` are the options with which it may be resumed.
    """

    way: Way
    why: str = ""
    may_restart: bool = True
    missing: str = ""

    @property
    def how_to_resume(self) -> str:
        """What to do so that the program is resumed."""
        can = "if it saves checkpoints and continues from them"
        return f"{can}, add {self.missing}; see docs/how-to/any-program.md"

    def warning(self, walltime_s: float | None) -> str:
        """Returns that the program will not be resumed, without the advice; empty if it may be."""
        if self.way != "never":
            return ""
        after = f"after {format_walltime(int(walltime_s))}" if walltime_s else "after its walltime"
        nor = "" if self.may_restart else ", nor started again after a failure"
        return f"this program will not be resumed {after}{nor}: {self.why}"


def resumption_of(
    command: Sequence[str], directory: Path | None, *, on_signal: bool, has_progress: bool
) -> Resumption:
    """Returns how the program of a command, which is started in `directory`, is resumed.

    `on_signal` means --requeue on-signal, and `has_progress` that --progress names checkpoints.
    """
    program = program_of(command)
    if program is not None and program.is_trainer:
        return Resumption("snapshots")
    if on_signal and has_progress:
        return Resumption("signal")
    if program is None or directory is None:
        return Resumption("unknown")
    from ddp_hpc.request.program_files import files_of
    from ddp_hpc.request.program_use import use_of

    use = use_of(files_of(program, directory))
    if use.saves or use.stops:
        return Resumption("snapshots" if use.saves else "checkpoints")
    can_stop, records = on_signal or use.exits, has_progress or use.records
    if can_stop and records:
        return Resumption("signal" if on_signal else "exit 75")
    if not use.is_plain:
        return Resumption("unknown")
    to_record = "--progress 'CHECKPOINTS*'"
    if can_stop:
        why = f"{program.name} does not record its checkpoints in DDP_HPC_PROGRESS_FILE"
        return Resumption("never", why, may_restart=False, missing=to_record)
    return Resumption(
        "never",
        f"{program.name} neither uses ddp_hpc to save or to stop in time, nor exits with code 75",
        may_restart=records,
        missing="--requeue on-signal" if records else f"--requeue on-signal {to_record}",
    )
