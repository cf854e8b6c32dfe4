"""The run folder's word on how far a run is: one line that job scripts read too.

Launchers bend exit codes, so the line is the truth: `STATE STEP REASON`, replaced as
a whole. In bash: `read -r state step reason <"$DDP_HPC_RUN_DIR/state"`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ddp_hpc.errors import DdpHpcError
from ddp_hpc.partial_files import write_whole

STATES = ("running", "requeue", "done", "failed")
_REQUEUE_IN_0_1 = "again"
_NAME, _REFUSED = "state", "refused"
_STEP = re.compile(r"[0-9]{1,18}")


@dataclass(frozen=True)
class RunState:
    """`running`, `requeue` (stopped on purpose, to be resumed by another job), `done` or `failed`."""

    state: str
    step: int  # of the newest complete snapshot; 0: there is none
    reason: str


def read_state(folder: Path) -> RunState | None:
    """What the folder says; None where nothing was written yet.

    Raises:
        DdpHpcError: the file is there and is not such a line, or cannot be read.
    """
    path = folder / _NAME
    try:
        words = path.read_text(encoding="utf-8").split(maxsplit=2)
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise DdpHpcError(f"{path}: cannot be read") from error
    if words[:1] == [_REQUEUE_IN_0_1]:
        words[0] = "requeue"
    if len(words) < 2 or words[0] not in STATES or not _STEP.fullmatch(words[1]):
        raise DdpHpcError(f"{path}: is not `STATE STEP REASON`; remove the file, or name another run folder")
    return RunState(words[0], int(words[1]), words[2].strip() if len(words) > 2 else "")


def write_refused(folder: Path, environ: Mapping[str, str]) -> None:
    """Tells the job's script that its ranks never began, whatever `state` says by then: it is another's word.

    Exit codes do not tell: torchrun, for one, makes a 1 of each.

    Raises:
        DdpHpcError: it cannot be written.
    """
    if attempt := environ.get("DDP_HPC_THIS_ATTEMPT", ""):
        write_whole(
            folder / _REFUSED, f"{attempt}\n".encode("utf-8", "surrogateescape"), _REFUSED, is_private=True
        )


def write_state(folder: Path, state: RunState, environ: Mapping[str, str] = os.environ) -> None:
    """Replaces the line atomically. `environ` tells which words the job's script understands.

    Raises:
        DdpHpcError: it cannot be written.
    """
    # Scripts that version 0.1 rendered can be in the queue while a newer version is installed.
    is_old_script = "DDP_HPC_MAX_ATTEMPTS" in environ and environ.get("DDP_HPC_STATE_FORMAT") != "2"
    word = _REQUEUE_IN_0_1 if state.state == "requeue" and is_old_script else state.state
    line = f"{word} {state.step} {' '.join(state.reason.split())}".rstrip() + "\n"
    write_whole(folder / _NAME, line.encode("utf-8", "backslashreplace"), _NAME, is_private=True)
