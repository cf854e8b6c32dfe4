"""Columnar storage of a trace's events, since millions of objects would need too much memory."""

from __future__ import annotations

from array import array
from typing import Any, TypeVar

import numpy as np

from ddp_hpc.trace.intervals import Ints, Longs
from ddp_hpc.trace.parse_events import Event

MOST_EVENTS = 4_000_000
"""Limit of events kept per kind and rank, at most 56 bytes each: traces may be larger than memory."""
_FAR_NS = 2.0**62


_Key = TypeVar("_Key")


class Numbers(dict[_Key, int]):
    """Numbers each new key with the number of keys before it."""

    def __missing__(self, key: _Key) -> int:
        number = self[key] = len(self)
        return number


class Columns:
    """The names, threads, starts and durations of events.

    Columns that share `threads` have the same thread numbers.
    """

    def __init__(self, threads: Numbers[tuple[Any, Any]] | None = None) -> None:
        self.names: Numbers[tuple[str, str]] = Numbers()
        """Numbers of (category, name) pairs, in the order of their first occurrence."""
        self.threads: Numbers[tuple[Any, Any]] = Numbers() if threads is None else threads
        self._name = array("i")
        self._thread = array("i")
        self._start_us = array("d")
        self._dur_us = array("d")
        self._values: dict[str, array[Any]] = {}
        self.num_dropped = 0

    def __len__(self) -> int:
        return len(self._name)

    def add(self, events: list[Event]) -> None:
        """Adds events until the limit is reached, and counts the rest as dropped."""
        room = max(0, MOST_EVENTS - len(self))
        if room < len(events):
            self.num_dropped += len(events) - room
            events = events[:room]
        names, threads = self.names, self.threads
        self._name.extend([names[event.cat, event.name] for event in events])
        self._thread.extend([threads[event.pid, event.tid] for event in events])
        self._start_us.extend([event.ts for event in events])
        self._dur_us.extend([event.dur for event in events])

    def add_values(self, name: str, values: list[Any]) -> None:
        """Adds the values of a field of the events that were added last, without those of dropped events."""
        own = self._values.setdefault(name, array("q" if name == "correlation" else "d"))
        own.extend(values[: len(self) - len(own)])

    def values(self, name: str) -> Any:
        """Returns the values of a field of the events, in which -1 is unknown. Empty if none were added."""
        own = self._values.get(name, array("q"))
        return np.frombuffer(own, own.typecode)

    @property
    def name(self) -> Ints:
        """The index of each event's name in `names`."""
        return np.frombuffer(self._name, np.intc)

    @property
    def thread(self) -> Ints:
        """The index of each event's thread, in the order of first occurrence."""
        return np.frombuffer(self._thread, np.intc)

    def first_us(self) -> float | None:
        """Returns the earliest start, or None without events."""
        return min(self._start_us, default=None)

    def start_ns(self, base_us: float) -> Longs:
        """Returns the starts relative to `base_us` in integer nanoseconds, so that comparisons are exact."""
        return nanoseconds(np.frombuffer(self._start_us) - base_us)

    def dur_ns(self) -> Longs:
        """Returns the durations in integer nanoseconds, at least 0."""
        return np.maximum(nanoseconds(np.frombuffer(self._dur_us)), 0)


def nanoseconds(microseconds: Any) -> Longs:
    """Converts to integer nanoseconds; NaN becomes 0."""
    limited = np.nan_to_num(np.asarray(microseconds, np.float64) * 1e3, nan=0.0)
    return np.rint(np.clip(limited, -_FAR_NS, _FAR_NS)).astype(np.int64)
