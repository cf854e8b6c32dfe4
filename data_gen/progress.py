"""Shows the progress of a long write: a line per 10 %, at most one per second."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

import click

from ddp_hpc.base.units import format_bytes

_SECONDS_BETWEEN_LINES = 1.0


def report_progress(label: str, stream: TextIO | None = None) -> Callable[[int, int], None]:
    """Returns a callback `(done_bytes, total_bytes)` that shows the progress on stderr or `stream`."""
    last_tenths = 0
    last_s = time.monotonic()

    def update(done_bytes: int, total_bytes: int) -> None:
        nonlocal last_tenths, last_s
        tenths = 10 * done_bytes // max(total_bytes, 1)
        now_s = time.monotonic()
        # For a file of a few megabytes this prints one line instead of ten.
        if tenths > last_tenths and (tenths == 10 or now_s - last_s >= _SECONDS_BETWEEN_LINES):
            last_tenths, last_s = tenths, now_s
            click.echo(f"{label}: {tenths * 10} % of {format_bytes(total_bytes)}", file=stream or sys.stderr)

    return update
