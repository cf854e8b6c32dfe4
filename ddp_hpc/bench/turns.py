"""Loaders timed in turns: a busy moment of the machine hits all of them, so the ratios of one run hold."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from ddp_hpc.bench.loaders import Batches, Order

WARM_UP_S = 2.0


@dataclass(frozen=True)
class Source:
    """One row to be: `open(order)` starts its endless batches."""

    name: str
    format: str
    open: Callable[[Order], Batches]
    path: Path | None = None
    workers: int = 0
    ahead: int = 0
    at_once: int = 1
    """Batches that come of one read."""

    @property
    def prefetched(self) -> int:
        """Batches that may lie ready before they are asked for."""
        return max(1, self.workers) * self.ahead * self.at_once

    @property
    def together(self) -> int:
        """Batches timed as one: those read at once or ahead come in bursts, whose median tells too little."""
        return max(self.at_once, 2 * self.prefetched)


def measure(
    sources: list[Source], order: Order, *, rounds: int, seconds: float, cold: bool = False
) -> list[list[float]]:
    """Seconds a batch of each source, from `rounds` turns that last `seconds`, but for one time at least.

    Each time is the mean over `together` batches, so over one where a read is of
    one and nothing is read ahead. An epoch, or two seconds of it, goes before as a warm-up. `cold`
    drops the file's pages before each turn, as far as the kernel follows, opens
    the file anew within the turn's first batch, and ends the turn with the epoch.
    """
    times: list[list[float]] = [[] for _ in sources]
    with ExitStack() as stack:
        opened: dict[str, Batches] = {}
        for turn in range(-1, rounds):
            for source, taken in zip(sources, times, strict=True):
                if cold and source.name in opened:
                    opened.pop(source.name).close()  # pages that are mapped stay
                    _evict(source.path)
                if source.name not in opened:
                    opened[source.name] = source.open(order)
                    stack.callback(opened[source.name].close)
                if turn < 0:
                    _turn(opened[source.name], source, WARM_UP_S, most=len(order))
                    continue
                # The second time round, the pages are there.
                taken += _turn(opened[source.name], source, seconds, len(order) if cold else sys.maxsize)
    return times


def _turn(batches: Batches, source: Source, seconds: float, most: int) -> list[float]:
    for _ in range(source.prefetched):
        next(batches)
    times: list[float] = []
    end_s = time.perf_counter() + seconds
    while not times or (time.perf_counter() < end_s and len(times) * source.together < most):
        start_s = time.perf_counter()
        for _ in range(source.together):
            _held = next(batches)  # as in a training loop, the last one goes when the next is there
        times.append((time.perf_counter() - start_s) / source.together)
    # Whoever reads ahead does it once more now, and not in the next one's turn.
    time.sleep(2 * source.prefetched * statistics.median(times))
    return times


def _evict(path: Path | None) -> None:
    """Asks the kernel to forget the file's pages; dirty ones it keeps, so they are written first."""
    if path is None:
        return
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
