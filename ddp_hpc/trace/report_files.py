"""The output files of `ddp-hpc report`. Does not import the packages that reading traces needs."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ddp_hpc.base.atomic_files import begins_with, write_atomically
from ddp_hpc.base.errors import RequestError
from ddp_hpc.base.version import __version__
from ddp_hpc.trace.analysis_results import Capture

PAGE_BEGINS = b"<!DOCTYPE html>\n<!-- ddp-hpc report -->"
_JSON_BEGINS = b'{\n "name": "report"'
MERGED_NAME = "ddp-hpc-report"
"""The name in the gzip header of merged traces, by which they are recognized."""
_MERGED_BEGINS = b"\x1f\x8b\x08\x08\0\0\0\0\x04\xff" + MERGED_NAME.encode()


def check_outputs(page: Path | None, numbers: Path | None, merged: Path | None = None) -> None:
    """Checks the output files before anything is read. Only earlier reports are overwritten.

    Raises:
        RequestError: an output cannot be written, or would overwrite another file.
    """
    given = {"-o": (page, PAGE_BEGINS), "--json": (numbers, _JSON_BEGINS)}
    given["--perfetto"] = (merged, _MERGED_BEGINS)
    if merged and merged.suffix != ".gz":
        raise RequestError(f"--perfetto {merged} is compressed with gzip; give a name that ends in .json.gz")
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


def numbers_of(captures: Sequence[Capture], sentences: Sequence[str]) -> dict[str, Any]:
    """Returns all numbers except those of the timeline, with the keys `changed` and `captures`."""
    return {"changed": list(sentences), "captures": [_fields(capture) for capture in captures]}


def _fields(capture: Capture) -> dict[str, Any]:
    fields = asdict(replace(capture, ranks=tuple(replace(trace, named=()) for trace in capture.ranks)))
    fields["mean"] |= {"wall_s": capture.mean.wall_s, "device_idle_s": capture.mean.device_idle_s}
    for trace in fields["ranks"]:
        # Omit these fields: the collectives, the steps and the critical path contain the same times.
        for name in ("busy", "path_links", "named", "queue"):
            del trace[name]
        for memory in trace["memory"]:
            del memory["curve"]
    return fields


def write_numbers(path: Path, numbers: dict[str, Any]) -> None:
    """Writes the numbers of a report as JSON, after the keys `name` ("report"), `created` and `versions`.

    Raises:
        DdpHpcError: the file cannot be written.
    """
    document = {
        "name": "report",
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"ddp_hpc": __version__},
        **numbers,
    }
    write_atomically(path, (json.dumps(document, indent=1) + "\n").encode(), "report")
