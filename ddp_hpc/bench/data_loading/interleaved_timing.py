"""Times loaders in turns, so that other load on the machine affects all of them and not their ratios."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from ddp_hpc.bench.data_loading.loaders import Batches, Order

WARM_UP_S = 2.0


@dataclass(frozen=True)
class Source:
    """A loader to measure; `open(order)` returns its endless iterator of batches."""

    name: str
    format: str
    open: Callable[[Order], Batches]
    path: Path | None = None
    workers: int = 0
    ahead: int = 0
    at_once: int = 1
    """Number of batches per read."""

    @property
    def prefetched(self) -> int:
        """The maximum number of batches that are read before they are requested."""
        return max(1, self.workers) * self.ahead * self.at_once

    @property
    def together(self) -> int:
        """The number of batches timed together, since single times vary if batches are read in groups."""
        return max(self.at_once, 2 * self.prefetched)


def measure(
    sources: list[Source], order: Order, *, rounds: int, seconds: float, cold: bool = False
) -> list[list[float]]:
    """Returns the times per batch in seconds of each source, from `rounds` turns of `seconds` each.

    A turn contains at least one time. Each time is the mean over `together` batches, which is 1
    if batches are read one at a time and not ahead. The warm-up ends after an epoch or two seconds.
    With `cold`, the pages of the file are dropped before each turn as far as the kernel allows,
    the file is reopened for the first batch, and the turn ends with the epoch.
    """
    times: list[list[float]] = [[] for _ in sources]
    with ExitStack() as stack:
        opened: dict[str, Batches] = {}
        for turn in range(-1, rounds):
            for source, taken in zip(sources, times, strict=True):
                if cold and source.name in opened:
                    opened.pop(source.name).close()  # pages in a memory map cannot be dropped
                    _evict(source.path)
                if source.name not in opened:
                    opened[source.name] = source.open(order)
                    stack.callback(opened[source.name].close)
                if turn < 0:
                    _turn(opened[source.name], source, WARM_UP_S, most=len(order))
                    continue
                # With `cold`, a turn ends with the epoch, because in a second epoch the pages would be in the
                # cache.
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
            _held = next(batches)  # kept until the next batch is available, as in a training loop
        times.append((time.perf_counter() - start_s) / source.together)
    # Wait for batches that are being read ahead, which would otherwise slow down the next source.
    time.sleep(2 * source.prefetched * statistics.median(times))
    return times


def _evict(path: Path | None) -> None:
    """Asks the kernel to drop the cached pages of the file; dirty pages are written first."""
    if path is None:
        return
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
