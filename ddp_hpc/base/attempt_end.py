"""How an attempt of a run ended: two files in the run directory. The names of the logs of its ranks.

- `end` has the cause, the rank, the step, the error and the exit code, as JSON. The trainer and the library
  write it, and `ddp-hpc exec` for a program that does not. The supervisor and `ddp-hpc status` read it.
- `rank_0` says whether the program of rank 0 ended: `ATTEMPT JOBID began`, then `ATTEMPT JOBID ended CODE`.
  `ddp-hpc exec` writes it.

Launchers change and lose exit codes: Hydra combines them, a pipe in a job script hides them, and srun reports
the largest one, which can be that of a rank that was terminated because of another rank. `ddp-hpc exec` is
the parent of each rank's program, so it knows the exit code.

`ATTEMPT JOBID` is the value of DDP_HPC_THIS_ATTEMPT, which the supervisor sets; without it, nothing is
written. Files of other attempts count as missing; the supervisor removes them before it starts the launcher.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ddp_hpc.base.atomic_files import move_into_place, partial_file, write_atomically
from ddp_hpc.base.errors import DdpHpcError
from ddp_hpc.base.run_outcomes import Cause
from ddp_hpc.base.timeline import Moment, note

ATTEMPTS, END, RANK_0 = "attempts", "end", "rank_0"
_WRITER = "end"
_MAX_BYTES = 64 * 1024


@dataclass(frozen=True, kw_only=True)
class AttemptEnd:
    """How an attempt ended.

    `rank` and `host` are those of the rank that failed; None and empty if no rank is to blame. `step` is the
    step in which it was, None if the training had not begun or the program does not count steps. `exception`
    is the type of the error, and `reason` one line about it. `exit_code` is 128 + N after signal N, as in
    bash. `silent_s` is the time between the last sign of life of the rank that failed and this record.
    """

    cause: Cause
    exit_code: int
    reason: str
    rank: int | None = None
    host: str = ""
    step: int | None = None
    exception: str = ""
    silent_s: float = 0.0


def place_of_end(environ: Mapping[str, str]) -> tuple[Path, str] | None:
    """Returns the run directory and the attempt of this process; None without a supervisor."""
    run_dir, attempt = environ.get("DDP_HPC_RUN_DIR", ""), environ.get("DDP_HPC_THIS_ATTEMPT", "")
    return (Path(run_dir), attempt) if run_dir and attempt else None


def is_replaced(run_dir: Path, attempt: str) -> bool:
    """Returns whether a later attempt of the run has started: the files in its directory belong to that one.

    The ranks on a node that is cut off from the others can live on, and can still reach the file system.
    """
    try:
        lines = (run_dir / ATTEMPTS).read_text(errors="replace").splitlines()
    except OSError:
        return False
    return bool(lines) and not lines[-1].startswith(f"{attempt} ")


def logs_of_attempt(attempt: int | str) -> str:
    """Returns the directory of the logs of all ranks, in the run directory."""
    return f"logs/attempt-{attempt}"


def rank_log(attempt: int | str, node: str, rank: int) -> str:
    """Returns the log of a rank in the run directory. Many files in one directory would be slow on Lustre."""
    return f"{logs_of_attempt(attempt)}/{node}/rank-{rank}.log"


def write_end(run_dir: Path, attempt: str, end: AttemptEnd, *, replace: bool = False) -> bool:
    """Records the end of an attempt, also in `timeline`; returns whether it was recorded.

    The first end of an attempt counts, such as that of the first rank that fails: the file is complete before
    the launcher can notice this end, so ranks that the launcher terminates afterwards do not replace it.
    `replace` is for the end of an attempt that continues after a failure: torchrun restarts its ranks.

    Raises:
        DdpHpcError: the file cannot be written.
    """
    path = run_dir / END
    content = json.dumps({"attempt": attempt, **asdict(end)}).encode()
    # A start that was refused can leave its end in the directory of an attempt that continues.
    replace = replace or (path.exists() and _of_attempt(path, attempt) is None)
    try:
        with partial_file(path, _WRITER) as partial:
            partial.write_bytes(content + b"\n")
            partial.chmod(0o644)
            move_into_place(partial, path, replace=replace)
    except FileExistsError:
        return False
    except OSError as error:
        raise DdpHpcError(f"{path}: cannot be written") from error
    note(run_dir, attempt, Moment.ATTEMPT_ENDED, **asdict(end))
    return True


def read_end(run_dir: Path, attempt: str) -> AttemptEnd | None:
    """Returns the recorded end of this attempt; None if there is none, or if the file is damaged."""
    with suppress(ValueError, TypeError, KeyError):
        if values := _of_attempt(run_dir / END, attempt):
            return AttemptEnd(
                cause=Cause(values["cause"]),
                exit_code=int(values["exit_code"]),
                reason=str(values["reason"]),
                rank=_number(values["rank"]),
                host=str(values["host"]),
                step=_number(values["step"]),
                exception=str(values["exception"]),
                silent_s=float(values.get("silent_s", 0.0)),
            )
    return None


def remove_end(run_dir: Path) -> None:
    """Removes the end of an attempt that continues, because torchrun has restarted its ranks."""
    with suppress(OSError):
        (run_dir / END).unlink(missing_ok=True)


def write_began(run_dir: Path, attempt: str) -> None:
    """Records that the program of rank 0 starts.

    Raises:
        DdpHpcError: the file cannot be written.
    """
    write_atomically(run_dir / RANK_0, f"{attempt} began\n".encode(), _WRITER, is_private=True)


def write_ended(run_dir: Path, attempt: str, exit_code: int) -> None:
    """Records the end of the program of rank 0.

    Raises:
        DdpHpcError: the file cannot be written.
    """
    write_atomically(run_dir / RANK_0, f"{attempt} ended {exit_code}\n".encode(), _WRITER, is_private=True)


def rank_0_end(run_dir: Path, attempt: str) -> int | None:
    """Returns the exit code of rank 0's program; None if it began in this attempt but has no recorded end.

    Raises:
        LookupError: rank 0 has recorded nothing in this attempt, for example because the job script does not
            use `ddp-hpc exec`.
    """
    words = _read(run_dir / RANK_0).split()
    if " ".join(words[:2]) != attempt or words[2:3] not in (["began"], ["ended"]):
        raise LookupError(attempt)
    return int(words[3]) if words[2] == "ended" and words[3:4] and words[3].isdecimal() else None


def _of_attempt(path: Path, attempt: str) -> dict[str, Any] | None:
    with suppress(ValueError, RecursionError):
        values = json.loads(_read(path))
        if isinstance(values, dict) and values.get("attempt") == attempt:
            return values
    return None


def _number(value: Any) -> int | None:
    if value is not None and type(value) is not int:
        raise TypeError(value)
    return value


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(_MAX_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""
