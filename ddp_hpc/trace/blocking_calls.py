"""Finds where the host waits: in calls of the device's runtime, and in code without any recorded call."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import numpy.typing as npt

from ddp_hpc.trace.analysis_results import AFTER, BEFORE, NO_CALL, HostTime
from ddp_hpc.trace.device_activity import Gaps, may_block
from ddp_hpc.trace.event_names import STEP
from ddp_hpc.trace.events_by_kind import Recording
from ddp_hpc.trace.intervals import NO_INTERVALS, Intervals, Longs, index_at, spent, union
from ddp_hpc.trace.named_events import CallTree
from ddp_hpc.trace.step_times import DeviceActivity, Steps

_MOST = 100
_LEAST_NS, _LEAST = 1_000_000, 0.01
"""The least time without a call, and the least fraction of a step, that count as a wait of the host."""


def blocking_calls(recording: Recording, steps: Steps, tree: CallTree) -> tuple[HostTime, ...]:
    """Returns the waits of the host by call, place and reason, those with the longest time first.

    These are calls that `may_block`, and long times in which no thread that launches kernels calls anything.
    """
    calls, device = recording.launches, steps.device
    chosen = may_block(calls, recording.device, device.launches if device else None)
    copies, still = np.full(len(calls), -1), (list[int](), NO_INTERVALS)
    if device:
        copies, still = _copies(recording, device, tree), _without_calls(recording, steps, device)
    # Until the device has finished the last step, or the last operator if no steps are marked.
    last = steps.on_host[1] if steps.separator else recording.host.ends
    is_after = (calls.starts >= last.max(initial=-(2**62))) & (calls.starts < steps.ends.max())
    is_after &= len(last) > 0
    at = np.flatnonzero(chosen & ~tree.is_nested & (is_after | _is_inside(steps, calls.starts)))
    is_before = calls.ends - steps.starts.min() < steps.starts.min() - calls.starts
    waits = []
    for i in at.tolist():
        operator, place = _around(recording, tree, int(tree.caller[i]))
        name = recording.device.names[recording.device.name[copies[i]]][1] if copies[i] >= 0 else ""
        reason = name.removeprefix("Memcpy ")
        place = AFTER if is_after[i] else BEFORE if device and is_before[i] else place
        waits.append((calls.names[calls.name[i]][1], operator, place, reason))
    waits += [("", *_around(recording, tree, caller), NO_CALL) for caller in still[0]]
    times = np.append(calls.starts[at], still[1][0]), np.append(calls.ends[at], still[1][1])
    idle = _idle_ns(times, device.gaps, int(steps.starts.min())) if device else np.zeros(len(waits), np.int64)
    collectives = union(recording.device.intervals(recording.is_collective))
    columns = ((times[1] - times[0]).tolist(), idle.tolist(), spent(times, collectives).tolist())
    sums: defaultdict[tuple[str, str, str, str], list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    for what, *values in zip(waits, *columns, strict=True):
        sums[what] = [total + value for total, value in zip(sums[what], (1, *values), strict=True)]
    found = [
        HostTime(name, operator, num_calls, wait_ns * 1e-9, place, reason, idle_ns * 1e-9, comm_ns * 1e-9)
        for (name, operator, place, reason), (num_calls, wait_ns, idle_ns, comm_ns) in sums.items()
    ]
    return tuple(sorted(found, key=lambda wait: -wait.total_s)[:_MOST])


def _copies(recording: Recording, device: DeviceActivity, tree: CallTree) -> Longs:
    """Returns the copy that each call launched, or else the one that its thread launched last, if this was in
    the same operator: torch synchronizes after a copy from or to memory that is not pinned. Without one, -1.
    """
    calls, launches, caller = recording.launches, device.launches, tree.caller
    event, order = np.full(len(calls), -1), np.lexsort((calls.starts, calls.thread))
    event[launches.call[launches.is_known]] = np.flatnonzero(launches.is_known)
    last = np.maximum.accumulate(np.where(event[order] >= 0, np.arange(len(order)), 0))
    before = np.empty(len(calls), np.int64)
    before[order] = order[last]
    is_same = (caller >= 0) & (caller[before] == caller)
    event = np.where(is_same | (event >= 0), event[before], -1)
    is_copy = recording.device.where(lambda category, _: category == "gpu_memcpy")
    return np.where((event >= 0) & is_copy[event], event, -1)


def _around(recording: Recording, tree: CallTree, caller: int) -> tuple[str, str]:
    """Returns the innermost operator or annotation around a call, and what is around this operator: the
    outermost operator in the innermost annotation.
    """
    host = recording.host
    names = [host.names[host.name[one]] for one in tree.enclosing(caller)]
    names = [pair for pair in names if not pair[1].startswith(STEP)]  # operators in old traces
    operators: list[str] = []
    while names and names[-1][0] == "cpu_op":
        operators.append(names.pop()[1])
    annotation = names[-1][1] if names else ""
    if not operators:
        return annotation, ""
    outer = operators[-1] if operators[-1] != operators[0] else ""
    return operators[0], " in ".join(filter(None, (outer, annotation)))


def _without_calls(recording: Recording, steps: Steps, device: DeviceActivity) -> tuple[list[int], Intervals]:
    """Returns the long times in which the threads that launch kernels or run the steps begin and end nothing,
    except for those in which the host loads data, and the innermost events of the host around them.
    """
    host, calls = recording.host, recording.launches
    is_step = host.where(lambda _, name: name.startswith(STEP))
    threads = np.append(device.launches.thread[device.launches.is_known], host.thread[is_step])
    own, of_call = np.isin(host.thread, threads), calls.intervals(np.isin(calls.thread, threads))
    moments = np.unique(np.concatenate([*host.intervals(own), *of_call]))
    least_ns = max(_LEAST_NS, _LEAST * float(np.mean(steps.on_host[1] - steps.on_host[0])))
    long = np.flatnonzero((np.diff(moments) >= least_ns) & _is_inside(steps, moments[:-1]))
    for known in (of_call, *device.waited_for.values()):
        long = long[spent((moments[long], moments[long + 1]), union(known)) == 0]
    is_operator = host.where(lambda category, _: category == "cpu_op")
    inside, callers = [], []
    for at in long.tolist():
        is_around = own & ~is_step & (host.starts <= moments[at]) & (host.ends >= moments[at + 1])
        if len(around := np.flatnonzero(is_around)):
            inside.append(at)
            callers.append(max(around.tolist(), key=lambda one: (is_operator[one], host.starts[one], one)))
    chosen = np.array(inside, np.int64)
    return callers, (moments[chosen], moments[chosen + 1])


def _is_inside(steps: Steps, moments: Longs) -> npt.NDArray[np.bool_]:
    """Returns whether the host is in a step or, without marked steps, in the recording of the device."""
    return index_at(steps.on_host if steps.separator else (steps.starts, steps.ends), moments) >= 0


def _idle_ns(waits: Intervals, gaps: Gaps, begin: int) -> Longs:
    """Returns how long the device has nothing to do during each wait of the host and, if it has finished
    everything in one, until its next kernel or the next wait; but not more than the wait takes.
    The times before `begin` do not count, nor those in which the next kernel was launched already.
    """
    is_dry = (gaps.launched > gaps.begins) & (gaps.begins >= begin)
    gap_begins, gap_ends = gaps.begins[is_dry], gaps.ends[is_dry]
    order = np.argsort(waits[0], kind="stable")
    starts, ends = waits[0][order], waits[1][order]
    idle, is_dry = (gap_begins, gap_ends), index_at(union((starts, ends)), gap_begins) >= 0
    at = index_at(idle, ends)
    until = np.minimum(np.append(gap_ends, 0)[at], np.append(starts[1:], gaps.ends[-1]))
    after = np.where(np.append(is_dry, False)[at], np.maximum(until - ends, 0), 0)
    found = np.empty(len(starts), np.int64)
    found[order] = np.minimum(spent((starts, ends), idle) + after, ends - starts)
    return found
