"""Reads captures for `ddp-hpc report`, checks its output files, and writes JSON."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from ddp_hpc.base.atomic_files import begins_with, write_atomically
from ddp_hpc.base.errors import RequestError
from ddp_hpc.base.version import __version__
from ddp_hpc.trace.analysis_results import Capture
from ddp_hpc.trace.summarize_run import read_capture
from ddp_hpc.trace.trace_files import trace_files

PAGE_BEGINS = b"<!DOCTYPE html>\n<!-- ddp-hpc report -->"
_JSON_BEGINS = b'{\n "name": "report"'


def read_all(directories: Sequence[Path], num_processes: int | None) -> list[Capture]:
    """Reads the capture in each directory, with a progress bar on a terminal.

    Raises:
        RequestError: a directory contains no traces.
        DdpHpcError: reading failed.
    """
    num_files = sum(len(trace_files(directory)) for directory in directories)
    names = [directory.name or directory.resolve().name for directory in directories]
    with click.progressbar(
        length=num_files, label="reading traces", file=sys.stderr, hidden=not sys.stderr.isatty()
    ) as bar:
        return [
            read_capture(
                directory,
                name if names.count(name) == 1 else str(directory),
                num_processes,
                seen=lambda _: bar.update(1),
            )
            for name, directory in zip(names, directories, strict=True)
        ]


def check_outputs(page: Path | None, numbers: Path | None) -> None:
    """Checks the output files before anything is read. Only earlier reports are overwritten.

    Raises:
        RequestError: an output cannot be written, or would overwrite another file.
    """
    given = {"-o": (page, PAGE_BEGINS), "--json": (numbers, _JSON_BEGINS)}
    seen: dict[Path, str] = {}
    for option, (path, begins) in given.items():
        if path is None:
            continue
        if path.is_dir() or not path.name:
            raise RequestError(f"{option} {path} is a directory; give the name of a file")
        if (other := seen.setdefault(path.resolve(), option)) != option:
            raise RequestError(f"{option} and {other} name the same file, {path}; use two different files")
        directory = next(p for p in (path.absolute().parent, *path.absolute().parents) if p.exists())
        if not directory.is_dir() or not os.access(directory, os.W_OK | os.X_OK):
            raise RequestError(
                f"cannot write {option} {path} (no permission in {directory}); choose another file"
            )
        if path.exists() and not (path.is_file() and begins_with(path, begins)):
            raise RequestError(
                f"{option} {path} exists and was not written by this option; choose another file, or remove "
                "this one"
            )


def write_json(captures: Sequence[Capture], sentences: Sequence[str], path: Path) -> None:
    """Writes all numbers except those of the timeline as JSON.

    The keys are `name` ("report"), `created`, `versions`, `changed` and `captures`.

    Raises:
        DdpHpcError: the file cannot be written.
    """
    document = {
        "name": "report",
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"ddp_hpc": __version__},
        "changed": list(sentences),
        "captures": [_fields(capture) for capture in captures],
    }
    write_atomically(path, (json.dumps(document, indent=1) + "\n").encode(), "report")


def _fields(capture: Capture) -> dict[str, Any]:
    fields = asdict(capture)
    fields["mean"] |= {"wall_s": capture.mean.wall_s, "device_idle_s": capture.mean.device_idle_s}
    for trace in fields["ranks"]:
        # Omit these fields: the collectives, the steps and the critical path contain the same times.
        for name in ("spans", "busy", "path_links"):
            del trace[name]
    return fields
