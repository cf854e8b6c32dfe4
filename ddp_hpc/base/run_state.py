"""The file `state` in the run directory, which contains one line `STATE STEP REASON`.

STEP is `-` if the program does not record it.

Job scripts read this file to decide whether to requeue, since launchers do not return the exit codes of ranks
unchanged. In bash: `read -r state step reason <"$DDP_HPC_RUN_DIR/state"`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from ddp_hpc.base.atomic_files import write_atomically
from ddp_hpc.base.errors import DdpHpcError
from ddp_hpc.base.run_outcomes import State

_NAME = "state"
_STEP, _UNKNOWN = re.compile(r"[0-9]{1,18}|-"), "-"


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


def write_state(directory: Path, state: RunState) -> None:
    """Writes the state file atomically.

    Raises:
        DdpHpcError: the file cannot be written.
    """
    step = state.step if state.is_step_known else _UNKNOWN
    line = f"{state.state} {step} {' '.join(state.reason.split())}".rstrip() + "\n"
    write_atomically(directory / _NAME, line.encode("utf-8", "backslashreplace"), _NAME, is_private=True)
