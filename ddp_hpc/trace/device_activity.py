"""Attributes the activity of a device to the steps and regions of the host's program that launched it.

Kernels run asynchronously, so the host's timeline does not show when they run. Kineto gives a kernel and the
runtime call that launched it the same correlation ID; the annotations and operators around that call say what
the kernel belongs to. The `gpu_user_annotation` events are not used: they cover only kernels launched by the
thread of the annotation, and therefore not the backward pass, which autograd runs in separate threads.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ddp_hpc.trace.intervals import Intervals, Longs, union

UNKNOWN = -1


@dataclass(frozen=True)
class Launches:
    """The call that launched each event of a device."""

    call: Longs
    """The index of the call, or `UNKNOWN` if it was not recorded."""
    thread: Longs
    """The number of the launching thread, or `UNKNOWN`."""
    moment: Longs
    """The start of the call or, if it was not recorded, of the event itself, in nanoseconds."""
    returned: Longs
    """The end of the call or, if it was not recorded, the start of the event itself."""

    @property
    def is_known(self) -> npt.NDArray[np.bool_]:
        """Whether the call was recorded, for each event."""
        return np.not_equal(self.call, UNKNOWN)


def find_launches(
    wanted: Longs, starts: Longs, correlation: Longs, threads: npt.NDArray[np.intc], calls: Intervals
) -> Launches:
    """Returns the launch of each event of a device.

    Args:
        wanted: the correlation IDs of the events, shape (events,).
        starts: the starts of the events.
        correlation: the correlation IDs of the calls, shape (calls,).
        threads: the threads of the calls.
        calls: the starts and ends of the calls. If several have the same ID, the first one is used.
    """
    if not len(correlation):
        unknown = np.full(len(wanted), UNKNOWN, np.int64)
        return Launches(unknown, unknown, starts, starts)
    order = np.lexsort((calls[0], correlation))
    at = np.minimum(np.searchsorted(correlation, wanted, sorter=order), len(order) - 1)
    call = order[at]
    is_known = (wanted >= 0) & (correlation[call] == wanted)
    return Launches(
        np.where(is_known, call, UNKNOWN),
        np.where(is_known, threads[call], UNKNOWN),
        np.where(is_known, calls[0][call], starts),
        np.where(is_known, calls[1][call], starts),
    )


def is_inside(
    launches: Launches, threads: npt.NDArray[np.intc], intervals: Intervals
) -> npt.NDArray[np.bool_]:
    """Returns for each launch whether it was inside an interval of its own thread."""
    inside = np.zeros(len(launches.moment), bool)
    for thread in np.unique(threads):
        own = threads == thread
        starts, ends = union((intervals[0][own], intervals[1][own]))
        mine = np.flatnonzero(launches.thread == thread)
        at = np.searchsorted(starts, launches.moment[mine], side="right") - 1
        inside[mine] = (at >= 0) & (launches.moment[mine] < ends[at])
    return inside


def step_windows(steps: Intervals, launches: Launches, ends: Longs) -> Intervals:
    """Returns the start and the end of each step on the device.

    A step begins on the device when the host has begun it and the device has finished everything that was
    launched before. If the device lags behind the host, a step thus lasts as long as the device's period.
    `ends` are the ends of the device's events.
    """
    begins, finishes = steps
    order = np.argsort(launches.moment, kind="stable")
    finished = np.maximum.accumulate(ends[order])
    before = np.searchsorted(launches.moment[order], np.append(begins, np.iinfo(np.int64).max))
    earlier = np.where(before > 0, finished[np.maximum(before - 1, 0)], np.iinfo(np.int64).min)
    starts = np.maximum.accumulate(np.maximum(begins, earlier[:-1]))
    closed = np.maximum(finishes, earlier[1:])
    following = np.append(starts[1:], np.iinfo(np.int64).max)
    is_behind = np.append(earlier[1:-1] >= begins[1:], False)
    return starts, np.maximum(np.minimum(np.where(is_behind, following, closed), following), starts)


@dataclass(frozen=True)
class Gaps:
    """The times in which a device does nothing, and the launch of the event that ends each of them."""

    begins: Longs
    launched: Longs
    """The start of the call that launches the event; at the end of all steps, the end of the gap."""
    returned: Longs
    ends: Longs
    is_known: npt.NDArray[np.bool_]
    """Whether the call was recorded."""
    event: Longs
    """The index of the event, or -1 at the end of all steps."""
    thread: Longs
    """The number of the launching thread, or `UNKNOWN`."""

    def by_cause(self) -> dict[str, Intervals]:
        """Returns the gaps divided by cause.

        `idle_host` is the time before the host launches the event, `idle_launch` the time during the call
        that launches it, and `idle_kernel` the time after the call. If the launch was not recorded, the whole
        gap is `idle_other`.
        """
        known = self.is_known
        moments = (self.begins, self.launched, self.returned, self.ends)
        causes = ("idle_host", "idle_launch", "idle_kernel")
        gaps = {cause: (moments[i][known], moments[i + 1][known]) for i, cause in enumerate(causes)}
        return gaps | {"idle_other": (self.begins[~known], self.ends[~known])}


def idle_gaps(busy: Intervals, events: Intervals, launches: Launches, whole: tuple[int, int]) -> Gaps:
    """Returns the times in which the device does nothing.

    Args:
        busy: the union of the events, not empty.
        events: the starts and ends of the device's events.
        launches: the launches of the events.
        whole: the start and the end of all steps. After its last event, the device waits for the host.
    """
    starts, ends = busy
    # If several events begin at the end of a gap, the one that was launched first ends it.
    order = np.lexsort((launches.moment, events[0]))
    first = order[np.searchsorted(events[0][order], starts)]
    ran_dry = np.append(min(whole[0], int(starts[0])), ends)
    resumed = np.append(starts, max(whole[1], int(ends[-1])))
    launched = np.clip(np.append(launches.moment[first], resumed[-1]), ran_dry, resumed)
    returned = np.clip(np.append(launches.returned[first], resumed[-1]), launched, resumed)
    is_known = np.append(launches.is_known[first], True)
    thread = np.append(launches.thread[first], UNKNOWN)
    return Gaps(ran_dry, launched, returned, resumed, is_known, np.append(first, -1), thread)
