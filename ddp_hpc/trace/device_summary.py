"""Summarizes the activity of one rank's device: launch statistics, busy times, critical path."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ddp_hpc.trace.analysis_results import LaunchStats, PathLinks
from ddp_hpc.trace.critical_path import COMMUNICATION, COMPUTE, MEMCPY, path_links, step_events
from ddp_hpc.trace.event_names import kernel_kind
from ddp_hpc.trace.events_by_kind import COLLECTIVE, RankEvents
from ddp_hpc.trace.intervals import Intervals, Longs
from ddp_hpc.trace.launch_stats import launch_stats
from ddp_hpc.trace.step_times import DeviceActivity, Steps

_MOST_BUSY = 2000
"""Limit of the busy intervals in the timeline. If there are more, the shortest gaps are closed."""


@dataclass(frozen=True)
class DeviceSummary:
    """The fields of RankTrace that describe a device."""

    busy: tuple[tuple[float, float], ...] = ()
    launches: LaunchStats | None = None
    path_links: PathLinks | None = None


def summarize(
    rank_events: RankEvents, steps: Steps, base_us: float, zero_s: float, num_collectives: int
) -> DeviceSummary:
    """Returns the summary of the device's events, which is empty if there are none.

    `num_collectives` is the length of the rank's list of collectives, to which the links refer.
    """
    activity = steps.device
    if activity is None:
        return DeviceSummary()
    calls = rank_events.launches
    begun = calls.start_ns(base_us)
    windows = (steps.starts, steps.ends)
    starts, ends = _few(activity.busy, _MOST_BUSY)
    return DeviceSummary(
        busy=tuple(zip((zero_s + starts * 1e-9).tolist(), (zero_s + ends * 1e-9).tolist(), strict=True)),
        launches=launch_stats(
            activity.events, activity.busy, activity.launches, (begun, begun + calls.dur_ns()), windows
        ),
        path_links=_links(rank_events, steps, activity, num_collectives),
    )


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
    found = np.full(len(columns), -1, np.int64)
    members = np.flatnonzero(is_collective)
    if len(members) == num_collectives:  # otherwise, some events were dropped
        order = np.argsort(activity.events[0][members], kind="stable")
        found[members[order]] = np.arange(len(members))
    return found
