"""Operations on arrays of time intervals in nanoseconds: union, coverage and nesting."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Ints: TypeAlias = npt.NDArray[np.intc]
Longs: TypeAlias = npt.NDArray[np.int64]
Intervals: TypeAlias = tuple[Longs, Longs]
"""Starts and ends of intervals, which may overlap and be in any order."""

NO_INTERVALS: Intervals = (np.empty(0, np.int64), np.empty(0, np.int64))


_MOST_LEVELS = 1000
"""Intervals that are nested more deeply, as in no real program, are treated as if nothing enclosed them."""


def union(intervals: Intervals) -> Intervals:
    """Returns the union of the intervals as sorted intervals that do not overlap."""
    starts, ends = intervals
    if not len(starts):
        return intervals
    order = np.argsort(starts, kind="stable")
    starts, reach = starts[order], np.maximum.accumulate(ends[order])
    first = np.concatenate([[True], starts[1:] > reach[:-1]])
    last = np.concatenate([first[1:], [True]])
    return starts[first], reach[last]


def few(intervals: Intervals, most: int) -> Intervals:
    """Returns at most `most` sorted intervals, after closing the shortest gaps between them."""
    starts, ends = intervals
    if len(starts) <= most:
        return intervals
    gaps = starts[1:] - ends[:-1]
    kept = np.sort(np.argpartition(gaps, len(gaps) - most + 1)[-(most - 1) :])
    return np.append(starts[0], starts[1:][kept]), np.append(ends[:-1][kept], ends[-1])


def is_within(inner: Intervals, outer: Intervals) -> npt.NDArray[np.bool_]:
    """Returns for each inner interval whether it is within the union of the outer ones."""
    starts, ends = union(outer)
    if not len(starts):
        return np.zeros(len(inner[0]), bool)
    at = np.searchsorted(starts, inner[0], side="right") - 1
    return (at >= 0) & (inner[1] <= ends[at])


def index_at(windows: Intervals, moments: Longs) -> Longs:
    """Returns for each moment the index of the window that contains it, or -1; windows are sorted."""
    at = np.searchsorted(windows[0], moments, side="right") - 1
    return np.where((at >= 0) & (moments < np.append(windows[1], 0)[at]), at, -1)


def cover(sets: Mapping[str, Intervals]) -> tuple[Longs, dict[str, npt.NDArray[np.bool_]]]:
    """Returns all starts and ends in order, and for each set whether it covers the gaps between them.

    The arrays of the second result have one entry per gap, which is one less than there are moments.
    """
    moments = np.unique(np.concatenate([side for pair in sets.values() for side in pair]))
    covered = {}
    for name, (starts, ends) in sets.items():
        change = np.zeros(len(moments) + 1, np.int64)
        np.add.at(change, np.searchsorted(moments, starts), 1)
        np.add.at(change, np.searchsorted(moments, ends), -1)
        covered[name] = (np.cumsum(change) > 0)[: max(0, len(moments) - 1)]
    return moments, covered


def overlap(first: Intervals, second: Intervals) -> int:
    """Returns the length of the times in an interval of both sets."""
    moments, inside = cover({"first": first, "second": second})
    return int(np.diff(moments)[inside["first"] & inside["second"]].sum())


def spent(intervals: Intervals, within: Intervals) -> Longs:
    """Returns the time of each interval in others, which are sorted and do not overlap."""
    starts, ends = within
    before = np.append(0, np.cumsum(ends - starts))

    def until(moments: Longs) -> Longs:
        at = np.searchsorted(starts, moments, side="right")
        return before[at] - np.where(at > 0, np.maximum(np.append(ends, 0)[at - 1] - moments, 0), 0)

    return until(intervals[1]) - until(intervals[0])


def parents(threads: Ints, starts: Longs, durations: Longs) -> Ints:
    """Returns for each interval the index of the one that directly encloses it on the same thread, or -1."""
    enclosing = np.full(len(starts), -1, np.intc)  # 32 bits to save memory for millions of events
    # Intervals without a duration take no time from the enclosing one.
    index = np.flatnonzero(durations > 0)
    # An enclosing interval is sorted first, because it starts earlier or ends later.
    index = index[np.lexsort((-durations[index], starts[index], threads[index]))]
    for members in np.split(index, np.flatnonzero(np.diff(threads[index])) + 1):
        begins = starts[members]
        ends = begins + durations[members]
        depth = np.arange(len(members)) - np.searchsorted(np.sort(ends), begins, side="right")
        order = np.argsort(depth, kind="stable").astype(np.intc)
        deepest = min(int(depth.max(initial=0)), _MOST_LEVELS)
        edges = np.searchsorted(depth, np.arange(deepest + 2), sorter=order)
        levels = [order[begin:end] for begin, end in itertools.pairwise(edges)]
        for above, below in itertools.pairwise(levels):
            enclosing[members[below]] = members[above[np.searchsorted(above, below) - 1]]
    return enclosing
