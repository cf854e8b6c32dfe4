"""Shows the progress of a long write: a bar on a terminal, and lines in a log.

There is a line per 10 %, but at most one per second.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TextIO

import click

from ddp_hpc.base.units import format_bytes

_SECONDS_BETWEEN_LINES = 1.0


@contextmanager
def shown_progress(label: str, stream: TextIO | None = None) -> Iterator[Callable[[int, int], None]]:
    """Yields a callback `(done_bytes, total_bytes)` that shows the progress on stderr or `stream`.

    Nothing is shown before the first call. The bar ends at the end of the `with` block.
    """
    stream = stream or sys.stderr
    if not stream.isatty():
        yield _lines(label, stream)
        return
    with ExitStack() as end:
        bar: Any = None

        def update(done_bytes: int, total_bytes: int) -> None:
            nonlocal bar
            if bar is None:
                bar = end.enter_context(click.progressbar(length=total_bytes, label=label, file=stream))
            bar.update(done_bytes - bar.pos)

        yield update


def _lines(label: str, stream: TextIO) -> Callable[[int, int], None]:
    last_tenths = 0
    last_s = time.monotonic()

    def update(done_bytes: int, total_bytes: int) -> None:
        nonlocal last_tenths, last_s
        tenths = 10 * done_bytes // max(total_bytes, 1)
        now_s = time.monotonic()
        # For a file of a few megabytes this prints one line instead of ten.
        if tenths > last_tenths and (tenths == 10 or now_s - last_s >= _SECONDS_BETWEEN_LINES):
            last_tenths, last_s = tenths, now_s
            click.echo(f"{label}: {tenths * 10} % of {format_bytes(total_bytes)}", file=stream)

    return update
