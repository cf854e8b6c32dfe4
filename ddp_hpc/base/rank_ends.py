"""How the ranks of a program ended: two files in the run directory that `ddp-hpc exec` writes.

Launchers change and lose exit codes: Hydra combines them, a pipe in a job script hides them, and srun reports
the largest one, which can be that of a rank that was terminated because of another rank. `ddp-hpc exec` is
the parent of each rank's program, so it knows the exit code. It writes two files:

- `rank_0`: `ATTEMPT JOBID began` when the program of rank 0 starts, `ATTEMPT JOBID ended CODE` at its end.
- `first_failure`: the end of the first rank that failed, as JSON. The file is complete before the launcher
  can notice this end, so ranks that the launcher terminates afterwards find the file and do not write.

`ATTEMPT JOBID` is the value of DDP_HPC_THIS_ATTEMPT, which the supervisor sets. Files of other attempts count
as missing; the supervisor removes them before it starts the launcher.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from ddp_hpc.base.atomic_files import move_into_place, partial_file, write_atomically
from ddp_hpc.base.errors import DdpHpcError

RANK_0, FIRST_FAILURE = "rank_0", "first_failure"
_WRITER = "exec"
_MAX_BYTES = 64 * 1024
_NUMBERS = ("rank", "world_size", "exit_code", "signal")


@dataclass(frozen=True, kw_only=True)
class RankEnd:
    """The end of one rank. `signal` is 0 if it exited; otherwise, `exit_code` is 128 + `signal`, as in bash.

    `reason` is empty unless `ddp-hpc exec` knows more than the exit code.
    """

    rank: int
    world_size: int
    host: str
    exit_code: int
    signal: int
    at_s: float
    reason: str = ""


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


def write_first_failure(run_dir: Path, attempt: str, end: RankEnd) -> bool:
    """Records the end of this rank, unless another rank has failed before; returns whether it was recorded.

    Raises:
        DdpHpcError: the file cannot be written.
    """
    path = run_dir / FIRST_FAILURE
    content = json.dumps({"attempt": attempt, **asdict(end)}).encode()
    try:
        with partial_file(path, _WRITER) as partial:
            partial.write_bytes(content + b"\n")
            partial.chmod(0o644)
            move_into_place(partial, path, replace=False)
    except FileExistsError:
        return False
    except OSError as error:
        raise DdpHpcError(f"{path}: cannot be written") from error
    return True


def first_failure(run_dir: Path, attempt: str) -> RankEnd | None:
    """Returns the end of the first rank that failed in this attempt; None if none has recorded a failure."""
    with suppress(ValueError, TypeError, KeyError, RecursionError):
        found = json.loads(_read(run_dir / FIRST_FAILURE))
        values = {field.name: found[field.name] for field in fields(RankEnd)}
        if found["attempt"] == attempt and all(type(values[name]) is int for name in _NUMBERS):
            return RankEnd(**{**values, "host": str(values["host"]), "reason": str(values["reason"])})
    return None


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(_MAX_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""
