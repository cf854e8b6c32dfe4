"""Computes what changes over time: the memory of each device, and the length of the queue of kernels."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from ddp_hpc.trace.analysis_results import Curve, Memory
from ddp_hpc.trace.device_activity import Launches
from ddp_hpc.trace.events_by_kind import Recording
from ddp_hpc.trace.intervals import Intervals, Longs
from ddp_hpc.trace.named_events import CallTree
from ddp_hpc.trace.step_times import Steps

_MOST_POINTS = 1000


def memories(recording: Recording, steps: Steps, tree: CallTree) -> tuple[Memory, ...]:
    """Returns the memory of each device for which allocations were recorded."""
    host, events = recording.host, recording.memory
    found = []
    for number, (_, device) in enumerate(events.names):
        own = np.flatnonzero(events.name == number)
        own = own[np.argsort(events.starts[own], kind="stable")]
        allocated, reserved = (events.fields[name][own] for name in ("allocated_bytes", "reserved_bytes"))
        peak = own[np.argmax(allocated)]
        moment = events.starts[peak]
        around = (host.thread == events.thread[peak]) & (host.starts <= moment) & (moment < host.ends)
        innermost = max(np.flatnonzero(around), key=lambda at: (host.starts[at], -host.ends[at]), default=-1)
        found.append(
            Memory(
                device=device,
                allocated_bytes=int(allocated.max()),
                reserved_bytes=int(reserved.max()),
                step=steps.numbers_at(moment[np.newaxis])[0],
                callers=tree.path(int(innermost), host),
                curve=_curve(recording.zero_s, events.starts[own], allocated, reserved),
            )
        )
    return tuple(found)


def queue(launches: Launches, started: Longs, steps: Intervals, zero_s: float) -> tuple[float, float, Curve]:
    """Returns the median length of the queue in the steps, the fraction of time in which it is empty, and
    its length over time.

    A kernel is in the queue from the start of the call that launches it to its own start, as in HTA.
    """
    is_queued = launches.is_known & (launches.moment < started)
    joined, left = launches.moment[is_queued], started[is_queued]
    moments = np.concatenate([joined, left, *steps])
    by = np.repeat([1, -1, 0], [len(joined), len(left), 2 * len(steps[0])])
    entered = np.repeat([0, 1, -1], [2 * len(joined), len(steps[0]), len(steps[0])])
    order = np.lexsort((-by, moments))
    length = np.cumsum(by[order])
    lasted = np.diff(moments[order], append=moments.max()) * (np.cumsum(entered[order]) > 0)
    of_length = np.cumsum(np.bincount(length, lasted))
    median = int(np.searchsorted(of_length, of_length[-1] / 2))
    empty = float(of_length[0] / (of_length[-1] or 1))
    return median, empty, _curve(zero_s, moments[order], length)


def _curve(zero_s: float, moments: Longs, *values: Any) -> Curve:
    """Returns moments and values; of many moments, those with the least and the largest of some values."""
    edges = np.linspace(0, len(moments), min(len(moments), _MOST_POINTS // 2) + 1).astype(int).tolist()
    pieces = [(first, values[0][first:last]) for first, last in itertools.pairwise(edges)]
    kept = np.unique([first + int(find(own)) for first, own in pieces for find in (np.argmin, np.argmax)])
    return (tuple((zero_s + moments[kept] * 1e-9).tolist()), *(tuple(of[kept].tolist()) for of in values))
