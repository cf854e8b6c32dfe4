"""Intervals of time as arrays of nanoseconds: which lie inside which, and what covers each moment."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Ints: TypeAlias = npt.NDArray[np.intc]
Longs: TypeAlias = npt.NDArray[np.int64]
Intervals: TypeAlias = tuple[Longs, Longs]
"""Starts and ends; they may overlap, in any order."""

NO_INTERVALS: Intervals = (np.empty(0, np.int64), np.empty(0, np.int64))


def joined(intervals: Intervals) -> Intervals:
    """The same moments, covered once each, in order."""
    starts, ends = intervals
    if not len(starts):
        return intervals
    order = np.argsort(starts, kind="stable")
    starts, reach = starts[order], np.maximum.accumulate(ends[order])
    first = np.concatenate([[True], starts[1:] > reach[:-1]])
    last = np.concatenate([first[1:], [True]])
    return starts[first], reach[last]


def cover(sets: Mapping[str, Intervals]) -> tuple[Longs, dict[str, npt.NDArray[np.bool_]]]:
    """All moments at which something begins or ends, and of each set whether it covers what follows.

    The second has one entry less than there are moments: a stretch between two neighbours each.
    """
    moments = np.unique(np.concatenate([side for pair in sets.values() for side in pair]))
    covered = {}
    for name, (starts, ends) in sets.items():
        change = np.zeros(len(moments) + 1, np.int64)
        np.add.at(change, np.searchsorted(moments, starts), 1)
        np.add.at(change, np.searchsorted(moments, ends), -1)
        covered[name] = (np.cumsum(change) > 0)[: max(0, len(moments) - 1)]
    return moments, covered


def parents(threads: Ints, starts: Longs, durations: Longs) -> Ints:
    """Which interval each lies directly in, on the same thread: its place in the arrays; -1 for none."""
    found = np.full(len(starts), -1, np.intc)  # half the memory, where there are millions
    # Of no duration: it takes nothing from whatever encloses it.
    index = np.flatnonzero(durations > 0)
    # Whoever encloses another comes before it: it starts earlier, or ends later.
    index = index[np.lexsort((-durations[index], starts[index], threads[index]))]
    for members in np.split(index, np.flatnonzero(np.diff(threads[index])) + 1):
        begins = starts[members]
        ends = begins + durations[members]
        depth = np.arange(len(members)) - np.searchsorted(np.sort(ends), begins, side="right")
        order = np.argsort(depth, kind="stable")
        levels = np.split(order, np.flatnonzero(np.diff(depth[order])) + 1)
        for above, below in itertools.pairwise(levels):
            found[members[below]] = members[above[np.searchsorted(above, below) - 1]]
    return found
