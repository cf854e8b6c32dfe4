"""Finds the processes of ranks in the files that `run_rank.py` writes."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from ddp_hpc.base import process_control


def processes_of(files: Iterable[Path]) -> list[process_control.Process]:
    """Returns the processes of the ranks with these files, SPOOL/pid.R for rank R, and their descendants."""
    ranks = set()
    for file in files:
        with suppress(OSError, ValueError):
            ranks.add(int(file.read_text()))
    children = process_control.descendants(*ranks) if ranks else []
    return [process for process in process_control.processes() if process.pid in ranks] + children
