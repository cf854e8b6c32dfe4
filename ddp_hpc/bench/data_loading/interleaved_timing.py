"""Times loaders in turns, so that other load on the machine affects all of them and not their ratios."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product

from ddp_hpc.bench.data_loading.loaders import Batches, Order

WARM_UP_S = 2.0


@dataclass(frozen=True)
class Source:
    """A loader to measure; `open(order)` returns its endless iterator of batches."""

    name: str
    format: str
    open: Callable[[Order], Batches]
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


def measure(sources: list[Source], order: Order, *, rounds: int, seconds: float) -> list[list[float]]:
    """Returns the times per batch in seconds of each source, from `rounds` turns of `seconds` each.

    A turn contains at least one time. Each time is the mean over `together` batches, which is 1
    if batches are read one at a time and not ahead. The warm-up ends after an epoch or two seconds.
    """
    times: list[list[float]] = [[] for _ in sources]
    with ExitStack() as stack:
        opened: dict[str, Batches] = {}
        for source in sources:
            opened[source.name] = source.open(order)
            stack.callback(opened[source.name].close)
            _turn(opened[source.name], source, WARM_UP_S, most=len(order))
        for _, (source, taken) in product(range(rounds), zip(sources, times, strict=True)):
            taken += _turn(opened[source.name], source, seconds, most=sys.maxsize)
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
