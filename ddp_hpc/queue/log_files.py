"""Finds the log files of a job, and reads their last lines or what was appended."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from glob import escape
from pathlib import Path

from ddp_hpc.base.errors import DdpHpcError
from ddp_hpc.schedulers.job_state import JobState

_TAIL_BYTES = 512 * 1024
_HEAD_BYTES = 64 * 1024
_CHUNK_BYTES = 1024 * 1024
_USUAL = ("*-{}.out", "*.o{}", "*.e{}")


def log_paths(job: JobState) -> list[Path]:
    """Returns the log files of the job: its output, then its errors if they are separate.

    Slurm's accounting does not store the paths of logs. If only the accounting knows the job, logs with
    default names are used.
    """
    if job.log:
        return [Path(path) for path in (job.log, job.error_log) if path]
    return usual_logs(Path(job.work_dir), job.job_id) if job.work_dir else []


def usual_logs(directory: Path, job_id: str) -> list[Path]:
    """Returns existing logs with default names: `NAME-ID.out` on Slurm, `NAME.oID` and `NAME.eID` on PBS."""
    number = escape(re.split(r"[.@]", job_id)[0])
    try:
        paths = [path for pattern in _USUAL for path in sorted(directory.glob(pattern.format(number)))]
    except (OSError, ValueError):
        return []
    return [path for path in paths if is_plain(path)]


def is_plain(path: Path) -> bool:
    """Returns whether the path is a regular file. Reading a pipe or a device could block forever."""
    return os.path.isfile(path)  # noqa: PTH113 - Path.is_file raises PermissionError


def is_there(paths: list[Path]) -> bool:
    """Returns whether one of the paths exists, also if it is a device."""
    return any(os.path.lexists(path) for path in paths)


def read_tail(paths: list[Path]) -> str:
    """Returns the last 512 KiB of each file, concatenated. Files that cannot be read are skipped."""
    return _read(paths, _TAIL_BYTES, from_end=True)


def read_head(paths: list[Path]) -> str:
    """Returns the first 64 KiB of each file, concatenated. Files that cannot be read are skipped."""
    return _read(paths, _HEAD_BYTES, from_end=False)


def _read(paths: list[Path], num_bytes: int, *, from_end: bool) -> str:
    text = ""
    for path in paths:
        with suppress(OSError):
            if is_plain(path):
                with path.open("rb") as file:
                    file.seek(max(0, path.stat().st_size - num_bytes) if from_end else 0)
                    text += file.read(num_bytes).decode("utf-8", "replace")
    return text


def age_s(paths: list[Path], now_s: float) -> float:
    """Returns the seconds since the last write to any of the files; 0 if no file exists."""
    times = []
    for path in paths:
        with suppress(OSError):
            times.append(path.stat().st_mtime)
    return max(0.0, now_s - max(times)) if times else 0.0


class Reader:
    """Reads the content that was appended to a file since the last call, or all of a truncated file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0

    def new(self) -> Iterator[bytes]:
        """Yields the new content, in chunks of at most 1 MiB.

        Raises:
            DdpHpcError: the file exists, but cannot be read.
        """
        if not is_plain(self.path):
            return
        try:
            with self.path.open("rb") as file:
                # This loop ends even if another process writes faster than it reads.
                end = os.fstat(file.fileno()).st_size
                if end < self._offset:
                    self._offset = 0
                file.seek(self._offset)
                while self._offset < end and (chunk := file.read(min(_CHUNK_BYTES, end - self._offset))):
                    self._offset += len(chunk)
                    yield chunk
        except OSError as error:
            denied = isinstance(error, PermissionError)
            remedy = "only the owner of the job can read it" if denied else "check its file system"
            raise DdpHpcError(f"{self.path} cannot be read ({error.strerror}); {remedy}") from error
