"""The file `state` in the run directory, which contains one line `STATE STEP REASON`.

STEP is `-` if the program does not record it.

Job scripts read this file to decide whether to requeue, since launchers do not return the exit codes of ranks
unchanged. In bash: `read -r state step reason <"$DDP_HPC_RUN_DIR/state"`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from ddp_hpc.base.atomic_files import write_atomically
from ddp_hpc.base.errors import DdpHpcError

_NAME, _REFUSED = "state", "refused"
_STEP, _UNKNOWN = re.compile(r"[0-9]{1,18}|-"), "-"


class State(StrEnum):
    """The first word in the file `state`. docs/explanation/snapshots-and-requeue.md has a table of them."""

    RUNNING = "running"
    """An attempt has begun. If no process is left, its ranks were lost before they could report a reason."""
    REQUEUE = "requeue"
    """The attempt has ended, its state is saved, and another job resumes the run."""
    DONE = "done"
    """The training, or the program, is complete."""
    FAILED = "failed"
    """The attempt has ended with an error, and no job resumes the run by itself."""

    @property
    def is_final(self) -> bool:
        """Whether the attempt that wrote this state has ended."""
        return self is not State.RUNNING

    def may_become(self, later: State, *, in_same_attempt: bool) -> bool:
        """Returns whether `later` may replace this state, in the attempt that wrote it or in a later one."""
        return later in (_IN_AN_ATTEMPT if in_same_attempt else _IN_A_LATER_ATTEMPT)[self]


# An attempt ends once: the first final state counts, even if something fails afterwards.
_IN_AN_ATTEMPT = {
    State.RUNNING: (State.RUNNING, State.REQUEUE, State.DONE, State.FAILED),
    State.REQUEUE: (),
    State.DONE: (),
    State.FAILED: (),
}
# An attempt that fails before it begins leaves a complete run complete.
_IN_A_LATER_ATTEMPT = {
    State.RUNNING: (State.RUNNING, State.REQUEUE, State.FAILED),
    State.REQUEUE: (State.RUNNING, State.REQUEUE, State.FAILED),
    State.DONE: (State.RUNNING,),
    State.FAILED: (State.RUNNING, State.REQUEUE, State.FAILED),
}


@dataclass(frozen=True)
class RunState:
    """The content of the file `state`."""

    state: State
    step: int  # step of the newest complete snapshot; 0 without a snapshot
    reason: str
    is_step_known: bool = True
    """False for a program that has saved a checkpoint, but does not record its step; the step is then 0."""


def state_path(directory: Path) -> Path:
    """Returns the path of the file in the run directory `directory`."""
    return directory / _NAME


def read_state(directory: Path) -> RunState | None:
    """Returns the state of the run in this directory; None if the file does not exist yet.

    Raises:
        DdpHpcError: the file has another format, or cannot be read.
    """
    path = directory / _NAME
    try:
        words = path.read_text(encoding="utf-8").split(maxsplit=2)
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise DdpHpcError(f"{path}: cannot be read") from error
    if len(words) < 2 or words[0] not in list(State) or not _STEP.fullmatch(words[1]):
        raise DdpHpcError(
            f"{path}: is not in the format `STATE STEP REASON`; remove it, or use another run directory"
        )
    step, reason = words[1], words[2].strip() if len(words) > 2 else ""
    return RunState(State(words[0]), 0 if step == _UNKNOWN else int(step), reason, step != _UNKNOWN)


def write_refused(directory: Path, environ: Mapping[str, str]) -> None:
    """Writes the file `refused`, which tells the job script that its ranks stopped before training.

    The script then ignores `state`, which another job may have written. The exit code is not sufficient for
    this purpose, since torchrun, for example, returns 1 for every failure.

    Raises:
        DdpHpcError: the file cannot be written.
    """
    if attempt := environ.get("DDP_HPC_THIS_ATTEMPT", ""):
        write_atomically(
            directory / _REFUSED, f"{attempt}\n".encode("utf-8", "surrogateescape"), _REFUSED, is_private=True
        )


def write_state(directory: Path, state: RunState) -> None:
    """Writes the state file atomically.

    Raises:
        DdpHpcError: the file cannot be written.
    """
    step = state.step if state.is_step_known else _UNKNOWN
    line = f"{state.state} {step} {' '.join(state.reason.split())}".rstrip() + "\n"
    write_atomically(directory / _NAME, line.encode("utf-8", "backslashreplace"), _NAME, is_private=True)
