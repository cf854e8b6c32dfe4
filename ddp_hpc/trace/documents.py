"""What `ddp-hpc report` reads and writes: captures in, a page, JSON and a merged trace out."""

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

from ddp_hpc import __version__
from ddp_hpc.errors import RequestError
from ddp_hpc.partial_files import write_whole
from ddp_hpc.trace.capture import read_capture
from ddp_hpc.trace.folder import trace_files
from ddp_hpc.trace.model import Capture

PAGE_BEGINS = b"<!DOCTYPE html>\n<!-- ddp-hpc report -->"
_JSON_BEGINS = b'{\n "name": "report"'


def read_all(folders: Sequence[Path], num_processes: int | None) -> list[Capture]:
    """A capture for each folder, with a progress bar on a terminal.

    Raises:
        RequestError: a folder holds no traces.
        DdpHpcError: reading failed.
    """
    num_files = sum(len(trace_files(folder)) for folder in folders)
    names = [folder.name or folder.resolve().name for folder in folders]
    with click.progressbar(
        length=num_files, label="reading traces", file=sys.stderr, hidden=not sys.stderr.isatty()
    ) as bar:
        return [
            read_capture(
                folder,
                name if names.count(name) == 1 else str(folder),
                num_processes,
                seen=lambda _: bar.update(1),
            )
            for name, folder in zip(names, folders, strict=True)
        ]


def check_outputs(
    folders: Sequence[Path], page: Path | None, numbers: Path | None, merged: Path | None
) -> None:
    """Before anything is read: only files of our own are overwritten, and no trace is added to traces.

    Raises:
        RequestError: an output cannot be written, or would overwrite something else.
    """
    given = {"-o": (page, PAGE_BEGINS), "--json": (numbers, _JSON_BEGINS), "--merged": (merged, None)}
    seen: dict[Path, str] = {}
    for option, (path, begins) in given.items():
        if path is None:
            continue
        if path.is_dir() or not path.name:
            raise RequestError(f"{option} {path}: a folder; name a file")
        if (other := seen.setdefault(path.resolve(), option)) != option:
            raise RequestError(f"{option} {path}: {other} names the same file; give each its own")
        folder = next(p for p in (path.absolute().parent, *path.absolute().parents) if p.exists())
        if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
            raise RequestError(
                f"{option} {path}: cannot be written (no right in {folder}); name another file"
            )
        if path.exists() and (begins is None or not _begins(path, begins)):
            raise RequestError(
                f"{option} {path}: exists, and this option did not write it; name another, or remove it"
            )
    if merged is not None:
        if not merged.name.endswith((".json", ".json.gz")):
            raise RequestError(f"--merged {merged}: has to end in .json or .json.gz, for Perfetto to open it")
        if merged.resolve().parent in [folder.resolve() for folder in folders]:
            raise RequestError(
                f"--merged {merged}: it would be taken for a rank's trace the next time; name another folder"
            )


def _begins(path: Path, begins: bytes) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(begins)) == begins


def write_json(captures: Sequence[Capture], sentences: Sequence[str], path: Path) -> None:
    """All numbers but the time line's: `{"name": "report", "created", "versions", "changed", "captures"}`.

    Raises:
        DdpHpcError: it cannot be written.
    """
    document = {
        "name": "report",
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"ddp_hpc": __version__},
        "changed": list(sentences),
        "captures": [_fields(capture) for capture in captures],
    }
    write_whole(path, (json.dumps(document, indent=1) + "\n").encode(), "report")


def _fields(capture: Capture) -> dict[str, Any]:
    fields = asdict(capture)
    fields["mean"]["wall_s"] = capture.mean.wall_s
    for trace in fields["ranks"]:
        del trace["spans"]  # the collectives and the steps have the same
    return fields
