"""Summarizes the activity of one rank's device: launch statistics, the queue of kernels, memory, and when it
was busy.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from ddp_hpc.trace.critical_path import path_links
from ddp_hpc.trace.device_activity import Launches
from ddp_hpc.trace.event_columns import Events
from ddp_hpc.trace.events_by_kind import Recording
from ddp_hpc.trace.intervals import Intervals, Longs, few, spent
from ddp_hpc.trace.named_events import CallTree
from ddp_hpc.trace.named_results import Curve, LaunchStats, Memory
from ddp_hpc.trace.step_times import DeviceActivity, Steps

_MOST_POINTS = 1000
"""Limit of the points of a curve."""
_MOST_BUSY = 2000
"""Limit of the busy intervals in the timeline."""


def summarize(recording: Recording, steps: Steps) -> dict[str, Any]:
    """Returns the fields of RankTrace that describe a device; without its events, the dictionary is empty."""
    activity, device, zero_s = steps.device, recording.device, recording.zero_s
    if activity is None:
        return {}
    starts, ends = few(activity.busy, _MOST_BUSY)
    shares = spent((starts, ends), activity.busy) / np.maximum(ends - starts, 1)
    times = ((zero_s + side * 1e-9).tolist() for side in (starts, ends))
    found: dict[str, Any] = {
        "busy": tuple(zip(*times, shares.tolist(), strict=True)),
        "path_links": path_links(recording, activity, steps),
    }
    windows = (steps.starts, steps.ends)
    is_counted = activity.launches.is_known & activity.is_counted
    if is_counted.any():
        median, empty, found["queue"] = _queue(activity.launches, device.starts, windows, zero_s)
        stats = _launch_stats(device, recording.launches, activity, is_counted, len(steps.numbers))
        found["launches"] = LaunchStats(**stats, queue_median=median, queue_empty=empty)
    return found


def _launch_stats(
    device: Events, calls: Events, activity: DeviceActivity, is_counted: Any, num_steps: int
) -> dict[str, Any]:
    """Returns the means per step of the counted events, defined like HTA's launch kernel statistics."""
    call = activity.launches.call[is_counted]
    starts, durations = device.starts[is_counted], device.durations[is_counted]
    # The calls that launched them, each with the start of the first of its events.
    order = np.lexsort((starts, call))
    used, first = np.unique(call[order], return_index=True)
    started, begun, returned = starts[order][first], calls.starts[used], calls.ends[used]
    # Calls are late if the device has finished all work that starts before their events.
    before = np.searchsorted(activity.busy[0], started, side="left") - 1
    is_graph = calls.where(lambda _, name: "GraphLaunch" in name)[call]
    outside = np.bincount(device.name[is_counted], durations * ~is_graph, len(device.names))
    earliest = np.argmin(starts)
    finished = np.where(before >= 0, activity.busy[1][np.maximum(before, 0)], np.iinfo(np.int64).min)
    return {
        "num_calls": len(used) / num_steps,
        "num_kernels": len(call) / num_steps,
        "num_short": int((durations < calls.durations[call]).sum()) / num_steps,
        "num_late": int((begun > finished).sum()) / num_steps,
        "kernel_s": float(np.median(durations)) * 1e-9,
        "num_graphs": len(np.unique(call[is_graph])) / num_steps,
        "num_in_graphs": int(is_graph.sum()) / num_steps,
        "share_of_graphs": float(durations[is_graph].sum() / (durations.sum() or 1)),
        "outside_graphs": device.names[outside.argmax()][1],
        "outside_graphs_s": float(outside.max()) * 1e-9 / num_steps,
        "behind_s": float(max(starts[earliest] - calls.ends[call[earliest]], 0)) * 1e-9,
        "call_s": float(np.median(returned - begun)) * 1e-9,
        "delay_s": float(np.median(np.maximum(started - returned, 0))) * 1e-9,
    }


def memories(recording: Recording, steps: Steps, tree: CallTree) -> tuple[Memory, ...]:
    """Returns the memory of each device for which allocations were recorded."""
    host, events = recording.host, recording.memory
    # Traces of torch 1.9 have only changes.
    is_known = events.fields["allocated_bytes"] >= 0
    is_change = not is_known.any()
    found = []
    for number, (_, device) in enumerate(events.names):
        own = np.flatnonzero((events.name == number) & (is_known | is_change))
        if not len(own):
            continue
        own = own[np.argsort(events.starts[own], kind="stable")]
        fields = ("allocated_bytes", "reserved_bytes", "change_bytes")
        allocated, reserved, changes = (events.fields[name][own] for name in fields)
        allocated = np.cumsum(changes) if is_change else allocated
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
                is_change=is_change,
            )
        )
    return tuple(found)


def _queue(launches: Launches, started: Longs, steps: Intervals, zero_s: float) -> tuple[float, float, Curve]:
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
