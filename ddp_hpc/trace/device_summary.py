"""Summarizes the activity of one rank's device: launch statistics, busy times, critical path."""

from __future__ import annotations

from typing import Any

import numpy as np

from ddp_hpc.trace.analysis_results import LaunchStats
from ddp_hpc.trace.critical_path import path_links
from ddp_hpc.trace.curves import queue
from ddp_hpc.trace.event_columns import Events
from ddp_hpc.trace.events_by_kind import Recording
from ddp_hpc.trace.intervals import Intervals, index_at
from ddp_hpc.trace.step_times import DeviceActivity, Steps

_MOST_BUSY = 2000
"""Limit of the busy intervals in the timeline. If there are more, the shortest gaps are closed."""


def summarize(recording: Recording, steps: Steps, num_collectives: int) -> dict[str, Any]:
    """Returns the fields of RankTrace that describe a device; without its events, the dictionary is empty.

    `num_collectives` is the length of the rank's list of collectives, to which the links refer.
    """
    activity, device, zero_s = steps.device, recording.device, recording.zero_s
    if activity is None:
        return {}
    starts, ends = _few(activity.busy, _MOST_BUSY)
    found: dict[str, Any] = {
        "busy": tuple(zip((zero_s + starts * 1e-9).tolist(), (zero_s + ends * 1e-9).tolist(), strict=True)),
        "path_links": path_links(device, activity, steps, num_collectives),
    }
    windows = (steps.starts, steps.ends)
    is_counted = activity.launches.is_known & (index_at(windows, device.starts) >= 0)
    if is_counted.any():
        median, empty, found["queue"] = queue(activity.launches, device.starts, windows, zero_s)
        stats = _launch_stats(device, recording.launches, activity, is_counted, len(steps.numbers))
        found["launches"] = LaunchStats(**stats, queue_median=median, queue_empty=empty)
    return found


def _few(busy: Intervals, most: int) -> Intervals:
    """Returns at most `most` intervals, after closing the shortest gaps between them."""
    starts, ends = busy
    if len(starts) <= most:
        return busy
    gaps = starts[1:] - ends[:-1]
    kept = np.sort(np.argpartition(gaps, len(gaps) - most + 1)[-(most - 1) :])
    return np.append(starts[0], starts[1:][kept]), np.append(ends[:-1][kept], ends[-1])


def _launch_stats(
    device: Events, calls: Events, activity: DeviceActivity, is_counted: Any, num_steps: int
) -> dict[str, float]:
    """Returns the means per step of the counted events, defined like HTA's launch kernel statistics."""
    call = activity.launches.call[is_counted]
    starts, durations = device.starts[is_counted], device.durations[is_counted]
    # The calls that launched them, each with the start of the first of its events.
    order = np.lexsort((starts, call))
    used, first = np.unique(call[order], return_index=True)
    started, begun, returned = starts[order][first], calls.starts[used], calls.ends[used]
    # Calls are late if the device has finished all work that starts before their events.
    before = np.searchsorted(activity.busy[0], started, side="left") - 1
    finished = np.where(before >= 0, activity.busy[1][np.maximum(before, 0)], np.iinfo(np.int64).min)
    return {
        "num_calls": len(used) / num_steps,
        "num_kernels": len(call) / num_steps,
        "num_short": int((durations < calls.durations[call]).sum()) / num_steps,
        "num_late": int((begun > finished).sum()) / num_steps,
        "call_s": float(np.median(returned - begun)) * 1e-9,
        "delay_s": float(np.median(np.maximum(started - returned, 0))) * 1e-9,
    }
