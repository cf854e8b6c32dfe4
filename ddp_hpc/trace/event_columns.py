"""Columnar storage of a trace's events, since millions of objects would need too much memory."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ddp_hpc.trace.intervals import Intervals, Ints, Longs
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


@dataclass(frozen=True)
class Events:
    """Events of one kind, with times in nanoseconds relative to the first event of the rank."""

    names: tuple[tuple[str, str], ...]
    """(category, name) pairs, in the order of their first occurrence."""
    name: Ints
    """The index of each event's name in `names`."""
    threads: tuple[tuple[Any, Any], ...]
    """(process ID, thread ID) pairs, in the order of their first occurrence."""
    thread: Ints
    """The index of each event's thread in `threads`."""
    starts: Longs
    ends: Longs
    fields: dict[str, npt.NDArray[Any]]
    """The values of other fields of the events, in which -1 is unknown."""

    def __len__(self) -> int:
        return len(self.name)

    @property
    def durations(self) -> Longs:
        """The durations, at least 0."""
        return self.ends - self.starts

    def where(self, condition: Callable[[str, str], object]) -> npt.NDArray[np.bool_]:
        """Returns a mask of the events whose category and name satisfy the condition."""
        return np.array([bool(condition(*pair)) for pair in self.names], bool)[self.name]

    def chosen(self, at: npt.NDArray[Any]) -> Events:
        """Returns the events of a mask or of indices."""
        columns = {name: getattr(self, name)[at] for name in ("name", "thread", "starts", "ends")}
        return replace(self, **columns, fields={name: values[at] for name, values in self.fields.items()})

    def joined(self, other: Events) -> Events:
        """Returns these events and then others with the same thread numbers, without their fields."""
        if not len(other):
            return self
        pairs = {name: (getattr(self, name), getattr(other, name)) for name in ("thread", "starts", "ends")}
        return Events(
            names=self.names + other.names,
            name=np.concatenate([self.name, other.name + len(self.names)]),
            threads=max(self.threads, other.threads, key=len),
            fields={},
            **{name: np.concatenate(pair) for name, pair in pairs.items()},
        )

    def intervals(self, chosen: npt.NDArray[np.bool_] | slice = slice(None)) -> Intervals:
        """Returns the starts and ends of the chosen events."""
        return self.starts[chosen], self.ends[chosen]


class Columns:
    """Collects events. Columns that share `threads` have the same thread numbers.

    `fields` are the names and the type codes of their other fields.
    """

    def __init__(self, threads: Numbers[tuple[Any, Any]], **fields: str) -> None:
        self._threads = threads
        self._names: Numbers[tuple[str, str]] = Numbers()
        self._name = array("i")
        self._thread = array("i")
        self._start_us = array("d")
        self._dur_us = array("d")
        self._fields: dict[str, array[Any]] = {name: array(code) for name, code in fields.items()}
        self.num_dropped = 0

    def add(self, events: Sequence[Event], **fields: Sequence[Any]) -> None:
        """Adds events and their other fields until the limit is reached, and counts the rest as dropped."""
        room = MOST_EVENTS - len(self._name)
        self.num_dropped += max(0, len(events) - room)
        events, names, threads = events[:room], self._names, self._threads
        self._name.extend([names[event.cat, event.name] for event in events])
        self._thread.extend([threads[event.pid, event.tid] for event in events])
        self._start_us.extend([event.ts for event in events])
        self._dur_us.extend([event.dur for event in events])
        for name, values in fields.items():
            self._fields[name].extend(values[:room])

    def first_us(self) -> float | None:
        """Returns the earliest start, or None without events."""
        return min(self._start_us, default=None)

    def events(self, base_us: float) -> Events:
        """Returns the events with times relative to `base_us`, in integers, so that comparisons are exact."""
        starts = nanoseconds(np.frombuffer(self._start_us) - base_us)
        return Events(
            names=tuple(self._names),
            name=np.frombuffer(self._name, np.intc),
            threads=tuple(self._threads),
            thread=np.frombuffer(self._thread, np.intc),
            starts=starts,
            ends=starts + np.maximum(nanoseconds(np.frombuffer(self._dur_us)), 0),
            fields={name: np.frombuffer(own, own.typecode) for name, own in self._fields.items()},
        )


def nanoseconds(microseconds: Any) -> Longs:
    """Converts to integer nanoseconds; NaN becomes 0."""
    limited = np.nan_to_num(np.asarray(microseconds, np.float64) * 1e3, nan=0.0)
    return np.rint(np.clip(limited, -_FAR_NS, _FAR_NS)).astype(np.int64)
