"""Measures how the host launches the work of a device, like HTA's launch kernel statistics."""

from __future__ import annotations

import numpy as np

from ddp_hpc.trace.analysis_results import LaunchStats
from ddp_hpc.trace.device_activity import Launches
from ddp_hpc.trace.intervals import Intervals, Longs


def launch_stats(
    events: Intervals, busy: Intervals, launches: Launches, calls: Intervals, steps: Intervals
) -> LaunchStats | None:
    """Returns the means per step, or None if no launch of an event in the steps was recorded.

    Args:
        events: the starts and ends of the device's events.
        busy: the union of the events.
        launches: the launches of the events.
        calls: the starts and ends of the runtime calls, to which `launches.call` refers.
        steps: the steps of the device. An event belongs to the step in which it starts.
    """
    starts, ends = events
    at = np.searchsorted(steps[0], starts, side="right") - 1
    counted = np.flatnonzero(launches.is_known & (at >= 0) & (starts < steps[1][np.maximum(at, 0)]))
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
