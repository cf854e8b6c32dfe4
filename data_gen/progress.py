"""Shows the progress of a long write: as a bar on a terminal, or as one line per 10 % in the log of a job."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TextIO

import click

from ddp_hpc.base.units import format_bytes

_SECONDS_BETWEEN_LINES = 1.0


@contextmanager
def report_progress(label: str, stream: TextIO | None = None) -> Iterator[Callable[[int, int], None]]:
    """Provides a callback `(done_bytes, total_bytes)` that shows the progress on stderr or `stream`.

    Nothing is printed before its first call, so there is no output if a file is reused.
    """
    out = stream if stream is not None else sys.stderr
    with ExitStack() as stack:
        yield _bar(label, out, stack) if out.isatty() else _lines(label, out)


def _bar(label: str, out: TextIO, stack: ExitStack) -> Callable[[int, int], None]:
    shown: list[click._termui_impl.ProgressBar[int]] = []

    def update(done_bytes: int, total_bytes: int) -> None:
        if not shown:
            shown.append(stack.enter_context(click.progressbar(length=total_bytes, label=label, file=out)))
        shown[0].update(done_bytes - shown[0].pos)

    return update


def _lines(label: str, out: TextIO) -> Callable[[int, int], None]:
    last_tenths = 0
    last_s = time.monotonic()

    def update(done_bytes: int, total_bytes: int) -> None:
        nonlocal last_tenths, last_s
        tenths = 10 * done_bytes // max(total_bytes, 1)
        now_s = time.monotonic()
        # For a file of a few megabytes this prints one line instead of ten.
        if tenths > last_tenths and (tenths == 10 or now_s - last_s >= _SECONDS_BETWEEN_LINES):
            last_tenths, last_s = tenths, now_s
            click.echo(f"{label}: {tenths * 10} % of {format_bytes(total_bytes)}", file=out)

    return update
