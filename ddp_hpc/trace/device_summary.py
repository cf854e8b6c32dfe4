"""Summarizes the activity of one rank's device: launch statistics, busy times, critical path."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ddp_hpc.trace.analysis_results import Curve, LaunchStats, PathLinks
from ddp_hpc.trace.critical_path import COMMUNICATION, COMPUTE, MEMCPY, path_links, step_events
from ddp_hpc.trace.curves import queue
from ddp_hpc.trace.device_activity import Launches
from ddp_hpc.trace.event_names import kernel_kind
from ddp_hpc.trace.events_by_kind import COLLECTIVE, RankEvents
from ddp_hpc.trace.intervals import Intervals, Longs, index_at
from ddp_hpc.trace.step_times import DeviceActivity, Steps

_MOST_BUSY = 2000
"""Limit of the busy intervals in the timeline. If there are more, the shortest gaps are closed."""


def summarize(
    rank_events: RankEvents, steps: Steps, base_us: float, zero_s: float, num_collectives: int
) -> dict[str, Any]:
    """Returns the fields of RankTrace that describe a device; without its events, the dictionary is empty.

    `num_collectives` is the length of the rank's list of collectives, to which the links refer.
    """
    activity = steps.device
    if activity is None:
        return {}
    calls = rank_events.launches
    begun = calls.start_ns(base_us)
    windows = (steps.starts, steps.ends)
    starts, ends = _few(activity.busy, _MOST_BUSY)
    launches = _launch_stats(
        activity.events, activity.busy, activity.launches, (begun, begun + calls.dur_ns()), windows
    )
    curve: Curve = ()
    if launches:
        median, empty, curve = queue(activity.launches, activity.events[0], windows, zero_s)
        launches = replace(launches, queue_median=median, queue_empty=empty)
    return {
        "busy": tuple(zip((zero_s + starts * 1e-9).tolist(), (zero_s + ends * 1e-9).tolist(), strict=True)),
        "launches": launches,
        "path_links": _links(rank_events, steps, activity, num_collectives),
        "queue": curve,
    }


def _few(busy: Intervals, most: int) -> Intervals:
    """Returns at most `most` intervals, after closing the shortest gaps between them."""
    starts, ends = busy
    if len(starts) <= most:
        return busy
    gaps = starts[1:] - ends[:-1]
    kept = np.sort(np.argpartition(gaps, len(gaps) - most + 1)[-(most - 1) :])
    return np.append(starts[0], starts[1:][kept]), np.append(ends[:-1][kept], ends[-1])


def _links(
    rank_events: RankEvents, steps: Steps, activity: DeviceActivity, num_collectives: int
) -> PathLinks | None:
    """Returns the path links of the middle step, since the first and the last step are often unusual."""
    middle = len(steps.numbers) // 2
    labels = [_label(category, name) for category, name in rank_events.device.names]
    events = step_events(
        (int(steps.starts[middle]), int(steps.ends[middle])),
        activity,
        labels,
        rank_events.device.name,
        _collective_index(rank_events, activity, num_collectives),
    )
    return path_links(steps.numbers[middle], events) if events else None


def _label(category: str, name: str) -> tuple[str, str]:
    if category == COLLECTIVE:
        return COMMUNICATION, kernel_kind(name) or name
    return (MEMCPY if category in ("gpu_memcpy", "gpu_memset") else COMPUTE), name


def _collective_index(rank_events: RankEvents, activity: DeviceActivity, num_collectives: int) -> Longs:
    """Returns the index of each event in the rank's list of collectives, which is sorted by start, or -1."""
    columns = rank_events.device
    is_collective = np.array([category == COLLECTIVE for category, _ in columns.names], bool)[columns.name]
    index = np.full(len(columns), -1, np.int64)
    members = np.flatnonzero(is_collective)
    if len(members) == num_collectives:  # otherwise, some events were dropped
        order = np.argsort(activity.events[0][members], kind="stable")
        index[members[order]] = np.arange(len(members))
    return index


def _launch_stats(
    events: Intervals, busy: Intervals, launches: Launches, calls: Intervals, steps: Intervals
) -> LaunchStats | None:
    """Returns the means per step, or None if no launch of an event in the steps was recorded.

    They are defined like HTA's launch kernel statistics.

    Args:
        events: the starts and ends of the device's events.
        busy: the union of the events.
        launches: the launches of the events.
        calls: the starts and ends of the runtime calls, to which `launches.call` refers.
        steps: the steps of the device. An event belongs to the step in which it starts.
    """
    starts, ends = events
    counted = np.flatnonzero(launches.is_known & (index_at(steps, starts) >= 0))
    if not len(counted):
        return None
    begun, finished = calls
    call = launches.call[counted]
    is_short = ends[counted] - starts[counted] < finished[call] - begun[call]
    used, first_start = _first_starts(call, starts[counted])
    num_steps = len(steps[0])
    return LaunchStats(
        num_calls=len(used) / num_steps,
        num_kernels=len(counted) / num_steps,
        num_short=int(is_short.sum()) / num_steps,
        num_late=_num_late(busy, begun[used], first_start) / num_steps,
        call_s=float(np.median(finished[used] - begun[used])) * 1e-9,
        delay_s=float(np.median(np.maximum(first_start - finished[used], 0))) * 1e-9,
    )


def _first_starts(call: Longs, starts: Longs) -> tuple[Longs, Longs]:
    """Returns each call once, with the start of the first of its events."""
    order = np.lexsort((starts, call))
    used, first = np.unique(call[order], return_index=True)
    return used, starts[order][first]


def _num_late(busy: Intervals, begun: Longs, first_start: Longs) -> int:
    """Returns how many calls begin after the device has finished all work that starts before their events."""
    before = np.searchsorted(busy[0], first_start, side="left") - 1
    finished = np.where(before >= 0, busy[1][np.maximum(before, 0)], np.iinfo(np.int64).min)
    return int((begun > finished).sum())
