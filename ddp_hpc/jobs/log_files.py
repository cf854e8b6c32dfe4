"""The log files of a job: their paths, their last lines, and their new content."""

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
# sbatch prints "Submitted batch job 13" and qsub only the id; then follows a line of the job script. Scripts
# of version 0.1 end it with "goes on".
_SUCCESSOR = re.compile(
    r"^(?:Submitted batch job )?([0-9]+(?:\.[A-Za-z0-9.-]+)?)(?: on cluster (\S+))?\n"
    r"ddp-hpc: stopped at step .*; attempt [0-9]+ (?:resumes the run|goes on)$",
    re.MULTILINE,
)


def log_paths(job: JobState) -> list[Path]:
    """Returns the log files of the job: its output, then its errors if they are separate.

    Slurm's accounting does not contain their names, so the usual names are searched after the end of a job.
    """
    if job.log:
        return [Path(path) for path in (job.log, job.error_log) if path]
    return usual_logs(Path(job.work_dir), job.job_id) if job.work_dir else []


def usual_logs(directory: Path, job_id: str) -> list[Path]:
    """Returns existing logs with default names: `NAME-ID.out` on Slurm, `NAME.oID` and `NAME.eID` on PBS."""
    number = escape(re.split(r"[.@]", job_id)[0])
    try:
        found = [path for pattern in _USUAL for path in sorted(directory.glob(pattern.format(number)))]
    except (OSError, ValueError):
        return []
    return [path for path in found if is_plain(path)]


def is_plain(path: Path) -> bool:
    """Returns whether the path is a regular file. Reading a pipe or a device could block forever."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except (OSError, ValueError):
        return False


def read_tail(paths: list[Path]) -> str:
    """Returns the last 512 KiB of each file, concatenated. Files that cannot be read are skipped."""
    found = ""
    for path in paths:
        with suppress(OSError):
            if is_plain(path):
                with path.open("rb") as file:
                    file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
                    found += file.read(_TAIL_BYTES).decode("utf-8", "replace")
    return found


def age_s(paths: list[Path], now_s: float) -> float:
    """Returns the time since the last write to any of the files; 0 if no file exists."""
    times = []
    for path in paths:
        with suppress(OSError):
            times.append(path.stat().st_mtime)
    return max(0.0, now_s - max(times)) if times else 0.0


def successor_in(tail: str, job_id: str) -> str:
    """Returns the id of the successor that the job script queued according to the log, or an empty string."""
    own_cluster = job_id.partition("@")[2]
    named = [(number, cluster or own_cluster) for number, cluster in _SUCCESSOR.findall(tail)]
    ids = [f"{number}@{cluster}" if cluster else number for number, cluster in named]
    found = [one for one in ids if is_job_id(one) and not same_job(one, job_id)]
    return found[-1] if found else ""


class Reader:
    """Reads the content that was appended to a file since the last call, or all of a truncated file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0

    def new(self) -> Iterator[bytes]:
        """Yields the new content, in pieces of at most 1 MiB.

        Raises:
            OSError: the file exists, but cannot be read.
        """
        if not is_plain(self.path):
            return
        with self.path.open("rb") as file:
            # Content beyond this size is left for the next call: otherwise a fast writer could keep this loop
            # running.
            end = os.fstat(file.fileno()).st_size
            if end < self._offset:
                self._offset = 0
            file.seek(self._offset)
            while self._offset < end and (piece := file.read(min(_PIECE_BYTES, end - self._offset))):
                self._offset += len(piece)
                yield piece
