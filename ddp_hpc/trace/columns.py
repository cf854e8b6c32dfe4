"""Events of a trace in columns: millions of objects would not fit."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np

from ddp_hpc.trace.events import Event
from ddp_hpc.trace.intervals import Ints, Longs

MOST_EVENTS = 4_000_000
"""Kept of a kind and rank, 24 bytes each: a trace larger than memory is read to its end all the same."""
_FAR_NS = 2.0**62


class Columns:
    """Names, threads, starts and durations of events."""

    def __init__(self) -> None:
        self.names: dict[tuple[str, str], int] = {}
        """Category and name, numbered in the order of their coming."""
        self._threads: dict[tuple[Any, Any], int] = {}
        self._name = array("i")
        self._thread = array("i")
        self._start_us = array("d")
        self._dur_us = array("d")
        self.num_dropped = 0

    def __len__(self) -> int:
        return len(self._name)

    def add(self, events: list[Event]) -> None:
        """Takes the events in, as long as there is room."""
        room = max(0, MOST_EVENTS - len(self))
        if room < len(events):
            self.num_dropped += len(events) - room
            events = events[:room]
        names, threads = self.names, self._threads
        self._name.extend([names.setdefault((event.cat, event.name), len(names)) for event in events])
        self._thread.extend([threads.setdefault((event.pid, event.tid), len(threads)) for event in events])
        self._start_us.extend([event.ts for event in events])
        self._dur_us.extend([event.dur for event in events])

    @property
    def name(self) -> Ints:
        """Each event's number in `names`."""
        return np.frombuffer(self._name, np.intc)

    @property
    def thread(self) -> Ints:
        """Each event's thread, numbered in the order of their coming."""
        return np.frombuffer(self._thread, np.intc)

    def first_us(self) -> float | None:
        """The earliest start."""
        return min(self._start_us, default=None)

    def start_ns(self, base_us: float) -> Longs:
        """Starts from `base_us`; whole nanoseconds, so that one event ends where the next begins."""
        return nanoseconds(np.frombuffer(self._start_us) - base_us)

    def dur_ns(self) -> Longs:
        """Durations in whole nanoseconds, 0 or more."""
        return np.maximum(nanoseconds(np.frombuffer(self._dur_us)), 0)


def nanoseconds(microseconds: Any) -> Longs:
    """Whole nanoseconds; what is no number becomes 0."""
    limited = np.nan_to_num(np.asarray(microseconds, np.float64) * 1e3, nan=0.0)
    return np.rint(np.clip(limited, -_FAR_NS, _FAR_NS)).astype(np.int64)
