"""A job's log: where it is, its last lines, and what is new in it."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from contextlib import suppress
from glob import escape
from pathlib import Path

from ddp_hpc.schedulers.job_state import JobState, is_job_id, same_job

_TAIL_BYTES = 512 * 1024
_PIECE_BYTES = 1024 * 1024
_USUAL = ("*-{}.out", "*.o{}", "*.e{}")
# sbatch says "Submitted batch job 13", qsub the id alone; the script's own word follows.
_SUCCESSOR = re.compile(
    r"^(?:Submitted batch job )?([0-9]+(?:\.[A-Za-z0-9.-]+)?)(?: on cluster (\S+))?\n"
    r"ddp-hpc: stopped at step .*; attempt [0-9]+ goes on$",
    re.MULTILINE,
)


def log_paths(job: JobState) -> list[Path]:
    """The files that the job writes or has written: output, then errors where they go elsewhere.

    Slurm's accounts do not hold their names: the usual ones are looked for then.
    """
    if job.log:
        return [Path(path) for path in (job.log, job.error_log) if path]
    return usual_logs(Path(job.work_dir), job.job_id) if job.work_dir else []


def usual_logs(folder: Path, job_id: str) -> list[Path]:
    """What is there by a log's usual names: `NAME-ID.out` on Slurm, `NAME.oID` and `NAME.eID` on PBS."""
    number = escape(re.split(r"[.@]", job_id)[0])
    try:
        found = [path for pattern in _USUAL for path in sorted(folder.glob(pattern.format(number)))]
    except (OSError, ValueError):
        return []
    return [path for path in found if is_plain(path)]


def is_plain(path: Path) -> bool:
    """Whether it is a file that ends; a pipe or a device might never."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except (OSError, ValueError):
        return False


def read_tail(paths: list[Path]) -> str:
    """The last half megabyte of each file, one after the other; nothing of those that cannot be read."""
    found = ""
    for path in paths:
        with suppress(OSError):
            if is_plain(path):
                with path.open("rb") as file:
                    file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
                    found += file.read(_TAIL_BYTES).decode("utf-8", "replace")
    return found


def age_s(paths: list[Path], now_s: float) -> float:
    """How long ago the files were last written to; 0 where there are none."""
    times = []
    for path in paths:
        with suppress(OSError):
            times.append(path.stat().st_mtime)
    return max(0.0, now_s - max(times)) if times else 0.0


def successor_in(tail: str, job_id: str) -> str:
    """The job that the script has queued as its successor, if its log ends with such words."""
    own_cluster = job_id.partition("@")[2]
    named = [(number, cluster or own_cluster) for number, cluster in _SUCCESSOR.findall(tail)]
    ids = [f"{number}@{cluster}" if cluster else number for number, cluster in named]
    found = [one for one in ids if is_job_id(one) and not same_job(one, job_id)]
    return found[-1] if found else ""


class Reader:
    """Gives what has come to a file since the last time; a file that became shorter is read anew."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0

    def new(self) -> Iterator[bytes]:
        """What is new, in pieces of at most a megabyte.

        Raises:
            OSError: the file is there and cannot be read.
        """
        if not is_plain(self.path):
            return
        with self.path.open("rb") as file:
            # What is written from now on is for the next time: a fast writer must not hold us here.
            end = os.fstat(file.fileno()).st_size
            if end < self._offset:
                self._offset = 0
            file.seek(self._offset)
            while self._offset < end and (piece := file.read(min(_PIECE_BYTES, end - self._offset))):
                self._offset += len(piece)
                yield piece
