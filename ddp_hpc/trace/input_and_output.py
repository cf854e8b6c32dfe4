"""Reads captures for `ddp-hpc report`, and returns their numbers."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click

from ddp_hpc.trace.analysis_results import Capture
from ddp_hpc.trace.summarize_run import read_capture
from ddp_hpc.trace.trace_files import trace_files


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
