"""Reads captures for `ddp-hpc report`, and returns their numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ddp_hpc.trace.analysis_results import Capture
from ddp_hpc.trace.summarize_run import read_capture


def read_all(directories: Sequence[Path], num_processes: int | None) -> list[Capture]:
    """Reads the capture in each directory, with a progress bar on a terminal.

    Raises:
        RequestError: a directory contains no traces.
        DdpHpcError: reading failed.
    """
    names = [directory.name or directory.resolve().name for directory in directories]
    return [
        read_capture(directory, name if names.count(name) == 1 else str(directory), num_processes)
        for name, directory in zip(names, directories, strict=True)
    ]


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
