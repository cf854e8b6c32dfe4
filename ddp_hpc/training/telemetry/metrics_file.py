"""Numbers of a run: per step as JSON lines, and one summary at the end."""

from __future__ import annotations

import contextlib
import json
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import click

from ddp_hpc.errors import RequestError
from ddp_hpc.partial_files import begins_with, write_atomically


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One optimizer step, as `--metrics` writes it.

    `loss` is the mean over all samples of the step on all ranks; `samples` counts
    them. `data_s` is what this rank waited for data, `step_s` the whole step.
    """

    step: int  # from 1, over all epochs
    epoch: int  # from 1
    loss: float
    lr: float
    samples: int
    data_s: float
    step_s: float


class MetricsFile:
    """JSON lines on rank 0; a run without `--metrics` and the other ranks write nothing.

    A run that goes on after `start_step` steps goes on in its file: lines of later steps,
    which are trained again, go first.

    Raises:
        RequestError: where the file cannot be written.
    """

    def __init__(self, path: Path | None, start_step: int = 0) -> None:
        self._file: TextIO | None = None
        if path is None:
            return
        # torchrun starts failed ranks again: what they had written stays.
        again = start_step > 0 or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if start_step and path.exists():
                _cut_after(path, start_step)
            self._file = path.open("a" if again else "w", encoding="utf-8")
        except OSError as error:
            raise RequestError(f"--metrics {path}: cannot be written") from error

    def write(self, records: list[StepRecord]) -> None:
        """Appends the records, whole lines at once."""
        if self._file is not None:
            try:
                self._file.write("".join(json.dumps(vars(record)) + "\n" for record in records))
                self._file.flush()
            except OSError as error:
                # A full disk is no reason to end a training that runs.
                text = f"warning: --metrics {self._file.name}: stopped writing ({error.strerror})"
                click.echo(text, err=True)
                self._file = None

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()


def _cut_after(path: Path, step: int) -> None:
    """Takes off what follows the line of that step; a killed process may have left half a line."""
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
    """Why one of the output files must not or cannot be written; empty where all can. Writes nothing.

    A file that is there is only overwritten by its like: JSON. Anything else was
    named by mistake.
    """
    given = [(option, path) for option, path in paths.items() if path is not None]
    for i, (option, path) in enumerate(given):
        if any(path.absolute() == other.absolute() for _, other in given[:i]):
            return f"{option} {path}: {given[0][0]} uses the same file; use different files"
        if path.is_file() and path.stat().st_size and not begins_with(path, b"{"):
            is_data = data is not None and data.exists() and path.samefile(data)
            what = "is the data" if is_data else "exists and is not JSON"
            return f"{option} {path} {what} and would be overwritten; use another file, or remove it"
        folder = next(p for p in (path.absolute().parent, *path.absolute().parents) if p.exists())
        if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
            return f"{option} {path}: cannot be written (a directory, or no permission in {folder})"
    return ""


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Writes a JSON file whole or not at all."""
    write_atomically(path, (json.dumps(value, indent=2) + "\n").encode(), "json")


def versions() -> dict[str, str]:
    """The versions that a number depends on."""
    import numpy as np
    import torch

    from ddp_hpc.version import __version__

    found = {
        "ddp_hpc": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    if torch.cuda.is_available():
        found["nccl"] = ".".join(str(part) for part in torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
    return found
