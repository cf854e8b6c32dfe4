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

from ddp_hpc.trace.event_columns import Events
from ddp_hpc.trace.event_names import can_block
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
    is_earlier: npt.NDArray[np.bool_]
    """Whether its correlation ID is less than those of all recorded calls, since IDs increase."""

    @property
    def is_known(self) -> npt.NDArray[np.bool_]:
        """Whether the call was recorded, for each event."""
        return np.not_equal(self.call, UNKNOWN)


def may_block(calls: Events, device: Events, launches: Launches | None) -> npt.NDArray[np.bool_]:
    """Returns whether each call of the runtime can wait for the device: calls that synchronize, allocate or
    free memory, copies from or to memory that is not pinned, and copies whose call ends after the copy.
    """
    found = calls.where(lambda _, name: can_block(name))
    if launches:
        call = launches.call
        is_copy = (call >= 0) & device.where(lambda category, _: category == "gpu_memcpy")
        # CUDA: API synchronization behavior
        blocks = device.where(lambda _, name: "Pageable" in name)
        blocks |= np.append(calls.ends, 0)[call] >= device.ends
        found[call[is_copy & blocks]] = True
    return found


def find_launches(device: Events, calls: Events) -> Launches:
    """Returns the launch of each event of a device. If several calls have the same correlation ID, the first
    one is used.
    """
    wanted, correlation = device.fields["correlation"], calls.fields["correlation"]
    if not len(calls):
        unknown = np.full(len(device), UNKNOWN, np.int64)
        return Launches(unknown, unknown, device.starts, device.starts, np.zeros(len(device), bool))
    order = np.lexsort((calls.starts, correlation))
    at = np.minimum(np.searchsorted(correlation, wanted, sorter=order), len(order) - 1)
    call = order[at]
    is_known = (wanted >= 0) & (correlation[call] == wanted)
    return Launches(
        np.where(is_known, call, UNKNOWN),
        np.where(is_known, calls.thread[call], UNKNOWN),
        np.where(is_known, calls.starts[call], device.starts),
        np.where(is_known, calls.ends[call], device.starts),
        (wanted >= 0) & (wanted < correlation.min(where=correlation >= 0, initial=np.iinfo(np.int64).max)),
    )


def is_inside(calls: Launches | Events, host: Events, chosen: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Returns for each launch or event whether it began inside a chosen event of its own thread."""
    moments = calls.starts if isinstance(calls, Events) else calls.moment
    inside = np.zeros(len(moments), bool)
    for thread in np.unique(host.thread[chosen]):
        starts, ends = union(host.intervals(chosen & (host.thread == thread)))
        mine = np.flatnonzero(calls.thread == thread)
        at = np.searchsorted(starts, moments[mine], side="right") - 1
        inside[mine] = (at >= 0) & (moments[mine] < ends[at])
    return inside


def step_windows(steps: Intervals, launches: Launches, device: Events) -> Intervals:
    """Returns the start and the end of each step on the device.

    A step begins on the device when the host has begun it and the device has finished everything that was
    launched before. If the device lags behind the host, a step thus lasts as long as the device's period, and
    the first one does not contain what was launched before the recording.
    """
    begins, finishes = steps
    moments = np.where(launches.is_earlier, np.iinfo(np.int64).min, launches.moment)
    order = np.argsort(moments, kind="stable")
    finished = np.maximum.accumulate(device.ends[order])
    before = np.searchsorted(moments[order], np.append(begins, np.iinfo(np.int64).max))
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
        """Returns the parts of the gaps after the host has begun to launch the event that ends them.

        `idle_launch` is the time during the call that launches it, and `idle_kernel` the time after the call.
        If the launch was not recorded, the whole gap is `idle_other`.
        """
        known = self.is_known
        return {
            "idle_launch": (self.launched[known], self.returned[known]),
            "idle_kernel": (self.returned[known], self.ends[known]),
            "idle_other": (self.begins[~known], self.ends[~known]),
        }


def idle_gaps(busy: Intervals, device: Events, launches: Launches, steps: Intervals) -> Gaps:
    """Returns the times in which the device does nothing.

    `busy` is the union of the device's events, and `steps` are the starts and ends of the steps. After the
    last event, the device waits for the host.
    """
    starts, ends = busy
    # If several events begin at the end of a gap, the one that was launched first ends it.
    order = np.lexsort((launches.moment, device.starts))
    first = order[np.searchsorted(device.starts[order], starts)]
    ran_dry = np.append(min(steps[0].min(), starts[0]), ends)
    resumed = np.append(starts, max(steps[1].max(), ends[-1]))
    launched = np.clip(np.append(launches.moment[first], resumed[-1]), ran_dry, resumed)
    returned = np.clip(np.append(launches.returned[first], resumed[-1]), launched, resumed)
    is_known = np.append(launches.is_known[first], True)
    thread = np.append(launches.thread[first], UNKNOWN)
    return Gaps(ran_dry, launched, returned, resumed, is_known, np.append(first, -1), thread)
