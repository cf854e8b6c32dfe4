"""Writes the metrics of a run as one JSON line per step, and provides helpers for the summary."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import click

from ddp_hpc.base.atomic_files import begins_with, write_atomically
from ddp_hpc.base.errors import RequestError

# Lines that are kept while the file cannot be written: about 20 MB.
_MAX_WAITING = 100_000


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One optimizer step, as written by `--metrics`.

    `loss` is the mean over all samples of the step on all ranks; `samples` is their number. `data_s` is
    the time that this rank waited for data, and `step_s` the duration of the whole step.
    """

    step: int  # counted from 1 over all epochs
    epoch: int  # counted from 1
    loss: float
    lr: float
    samples: int
    data_s: float
    step_s: float


class MetricsFile:
    """Writes JSON lines to `path`.

    A run that resumes after `start_step` steps appends to the file, after removing the lines of later steps,
    which are repeated. Lines that cannot be written are kept in memory, and written with the next ones.

    Raises:
        RequestError: on construction: the file cannot be written.
    """

    def __init__(self, path: Path, start_step: int = 0) -> None:
        # torchrun restarts failed ranks: keep the lines of the earlier attempt.
        appends = start_step > 0 or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
        self._path, self._problem = path, ""
        # The lines that are not in the file. If there are too many, the oldest ones are dropped.
        self._waiting: list[bytes] = []
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if start_step and path.exists():
                _cut_after(path, start_step)
            self._file: FileIO | None = FileIO(path, "a" if appends else "w")
            self._end = os.fstat(self._file.fileno()).st_size
        except OSError as error:
            raise RequestError(f"cannot write to --metrics {path}; use another file") from error

    def write(self, records: list[StepRecord]) -> None:
        """Appends the records as complete lines. If that fails, the training continues."""
        self._waiting += [json.dumps(vars(record)).encode() + b"\n" for record in records]
        try:
            self._append(b"".join(self._waiting))
        except OSError as error:
            self._close()
            if not self._problem:
                self._warn(
                    f"cannot be written ({error.strerror}); ddp-hpc keeps up to {_MAX_WAITING:,} lines, and "
                    "tries again after the next steps"
                )
            self._problem = error.strerror or str(error)
            del self._waiting[:-_MAX_WAITING]
        else:
            if self._problem:
                self._warn("can be written again")
            self._problem, self._waiting = "", []

    def close(self) -> None:
        """Writes the remaining lines and closes the file."""
        if self._waiting:
            self.write([])
        if self._problem:
            self._warn(f"cannot be written ({self._problem}); the last steps are missing")
        self._close()

    def _append(self, lines: bytes) -> None:
        if self._file is None:
            self._file = FileIO(self._path, "a")
            if os.fstat(self._file.fileno()).st_size > self._end:
                os.ftruncate(self._file.fileno(), self._end)  # remove a part that the failed write has left
        left = memoryview(lines)
        while left:
            left = left[self._file.write(left) :]
        self._end = os.fstat(self._file.fileno()).st_size

    def _close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
        self._file = None

    def _warn(self, text: str) -> None:
        click.echo(f"warning: --metrics {self._path}: {text}", err=True)


def _cut_after(path: Path, step: int) -> None:
    """Truncates the file after the line of that step; a killed process can leave an incomplete line."""
    with path.open("r+b") as file:
        end = 0
        for line in file:
            with contextlib.suppress(ValueError, TypeError, KeyError):
                if line.endswith(b"\n") and json.loads(line)["step"] <= step:
                    end += len(line)
                    continue
            break
        file.truncate(end)


def check_outputs(paths: dict[str, Path | None], data: Path | None) -> str:
    """Returns why an output file must not or cannot be written; empty if all can. Writes nothing.

    An existing file is overwritten only if it is JSON; anything else was probably named by mistake.
    """
    given = [(option, path) for option, path in paths.items() if path is not None]
    for i, (option, path) in enumerate(given):
        if any(path.absolute() == other.absolute() for _, other in given[:i]):
            return f"{option} {path}: {given[0][0]} uses the same file; use different files"
        if path.is_file() and path.stat().st_size and not begins_with(path, b"{"):
            if data is not None and data.exists() and path.samefile(data):
                return f"{option} {path} is the data file and would be overwritten; use another file"
            return f"{option} {path} exists and is not JSON; use another file, or remove it"
        directory = next(p for p in (path.absolute().parent, *path.absolute().parents) if p.exists())
        if path.is_dir() or not directory.is_dir() or not os.access(directory, os.W_OK | os.X_OK):
            return (
                f"{option} {path}: cannot be written (a directory, or no permission in {directory}); "
                "use another file"
            )
    return ""


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Writes a JSON file atomically: completely or not at all."""
    write_atomically(path, (json.dumps(value, indent=2) + "\n").encode(), "json")
