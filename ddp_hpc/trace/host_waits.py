"""Finds what the host does while a device has nothing to do."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from ddp_hpc.trace.analysis_results import Gap, HostTime
from ddp_hpc.trace.device_activity import UNKNOWN, Gaps
from ddp_hpc.trace.event_columns import Events, Numbers
from ddp_hpc.trace.event_names import STEP, region_of
from ddp_hpc.trace.events_by_kind import Recording
from ddp_hpc.trace.intervals import Intervals, Ints, Longs, cover, index_at, parents, spent
from ddp_hpc.trace.named_events import WRAPPER, CallTree, only_callee
from ddp_hpc.trace.step_times import Steps

_MOST_GAPS, _MOST_WAITS = 10, 100
_WHOLE = ("data", "optimizer", "snapshot")
"""The regions in which operators have no rows of their own, since the remedy is that of the region."""


def host_waits(
    recording: Recording, steps: Steps, tree: CallTree, functions: Events
) -> tuple[tuple[HostTime, ...], tuple[Gap, ...], tuple[HostTime, ...]]:
    """Returns what the host does in all waits for late launches, the longest first, the longest gaps, and
    what the host does before the first step.
    """
    device = steps.device
    if device is None:
        return (), (), ()
    host, gaps = _Host(recording, steps, tree, functions), device.gaps
    windows = (steps.starts, steps.ends)
    times: defaultdict[tuple[str, str], int] = defaultdict(int)
    counts: defaultdict[tuple[str, str], int] = defaultdict(int)
    for thread in np.unique(gaps.thread).tolist():
        own = gaps.is_known & (gaps.thread == thread)
        idle = {"gap": (gaps.begins[own], gaps.launched[own]), "step": windows, **device.waited_for}
        moments, inside = cover(idle)
        chosen = inside["gap"] & inside["step"]
        for region in device.waited_for:  # which are causes of their own
            chosen &= ~inside[region]
        for what, (time_ns, count) in host.during(
            (moments[:-1][chosen], moments[1:][chosen]), thread
        ).items():
            times[what] += time_ns
            counts[what] += count
    found = [
        HostTime(*what, counts[what], times[what] * 1e-9)
        for what in sorted(times, key=lambda what: -times[what])[:_MOST_WAITS]
    ]
    return tuple(found), _longest(recording.device, steps, device.gaps, host), host.before_steps(steps)


def _longest(events: Events, steps: Steps, gaps: Gaps, host: _Host) -> tuple[Gap, ...]:
    found = []
    step_at = index_at((steps.starts, steps.ends), gaps.begins)
    is_shown = (step_at >= 0) | (not steps.separator) | (gaps.begins < steps.starts.min(initial=2**62))
    lengths = (gaps.ends - gaps.begins) * is_shown
    for at in np.argsort(-lengths, kind="stable")[:_MOST_GAPS].tolist():
        begin, end, event = int(gaps.begins[at]), int(gaps.ends[at]), int(gaps.event[at])
        if not lengths[at]:
            break
        did = host.during((gaps.begins[at : at + 1], gaps.ends[at : at + 1]), int(gaps.thread[at]))
        times: defaultdict[str, int] = defaultdict(int)
        for (call, operator), (time_ns, _) in did.items():
            times[call or operator] += time_ns
        longest = max(times, key=lambda what: times[what])
        of_longest = (what for what in did if (what[0] or what[1]) == longest)
        call, operator = max(of_longest, key=lambda what: did[what][0])
        kernel = events.names[events.name[event]][1] if event >= 0 else ""
        found.append(
            Gap(
                step=steps.numbers[step_at[at]] if step_at[at] >= 0 else None,
                after_s=(begin - int(steps.starts[max(step_at[at], 0)])) * 1e-9,
                dur_s=(end - begin) * 1e-9,
                call=call,
                operator=operator,
                kernel=kernel,
            )
        )
    return tuple(found)


class _Host:
    """The operators and annotations of the host, its calls of the device's runtime, and Python functions."""

    def __init__(self, recording: Recording, steps: Steps, tree: CallTree, functions: Events) -> None:
        host, calls = parts = recording.host, recording.launches
        self._thread = np.concatenate([part.thread for part in parts])
        self._begun = np.concatenate([part.starts for part in parts])
        self._ended = np.concatenate([host.ends, np.where(tree.is_nested, calls.starts, calls.ends)])
        self._above = np.concatenate([tree.above, tree.caller])
        self._callers, self._calls = (
            [*(("" if name.startswith(STEP) else name) for _, name in part.names), ""] for part in parts
        )
        place = _outermost(host.where(lambda _, name: region_of(name) in _WHOLE), tree.above)
        self._caller, self._call = (
            np.append(host.name[place], len(host.names)),
            np.append(calls.name, len(calls.names)),
        )
        self._is_counted = np.append(place == np.arange(len(host)), np.ones(len(calls), bool))
        self._num_host = len(host)
        is_step = host.where(lambda _, name: name.startswith(STEP))
        is_operator = host.where(lambda category, _: category == "cpu_op") & ~is_step
        self._is_work = np.append(is_operator, np.ones(len(calls), bool))
        while (more := ~self._is_work & (self._above >= 0) & self._is_work[self._above]).any():
            self._is_work |= more  # annotations inside operators
        self._launching = np.unique(steps.device.gaps.thread).tolist() if steps.device else []
        marks = host.where(lambda _, name: steps.separator and name.startswith(steps.separator))
        threads = host.thread[marks] if marks.any() else self._thread
        self._main = int(np.bincount(threads).argmax()) if len(threads) else UNKNOWN
        # What is not work: annotations and Python functions, of which the innermost counts. What torch
        # does around a module has the name of its function.
        own = np.flatnonzero(~self._is_work[: len(host)] & ~is_step & (host.thread == self._main))
        functions = functions.chosen(functions.thread == self._main)
        around = parents(functions.thread, functions.starts, functions.durations)
        is_wrapper = functions.where(lambda _, name: WRAPPER.search(name))
        callee = only_callee(functions.durations, around)
        callee = np.where(is_wrapper, callee, np.arange(len(callee)))
        while (callee != callee[callee]).any():
            callee = callee[callee]
        numbers = Numbers[str]()
        names = [self._callers[number] for number in self._caller[own]]
        names += [functions.names[number][1] for number in functions.name[callee]]
        self._name = np.array([numbers[name] for name in names], np.int64)
        self._names = tuple(numbers)
        self._is_span_counted = np.append(self._is_counted[own], ~is_wrapper)
        self._spans = (
            np.append(host.starts[own], functions.starts),
            np.append(host.ends[own], functions.ends),
        )
        starts, ends = self._spans
        self._around = parents(np.zeros(len(starts), np.intc), starts, ends - starts)

    def during(self, idle: Intervals, thread: int) -> dict[tuple[str, str], tuple[int, int]]:
        """Returns the time and the number of calls by the name of the call and of the innermost operator.

        The name of the call is empty outside of calls, and that of the operator outside of operators. If
        the thread runs no operator, those of the other launching threads count, and then the innermost
        annotation or Python function of the main thread.
        """
        found: defaultdict[tuple[str, str], tuple[int, int]] = defaultdict(lambda: (0, 0))
        for one in dict.fromkeys((thread, *self._launching)):
            starts, ends = idle
            if not len(starts):
                break
            is_near = self._is_work & (self._begun < ends[-1]) & (self._ended > starts[0])
            index = np.flatnonzero(is_near & (self._thread == one))
            own = self._own(index, idle)
            self._add(index[own > 0], own[own > 0], found)
            moments, inside = cover({"idle": idle, "host": (self._begun[index], self._ended[index])})
            left = inside["idle"] & ~inside["host"]
            idle = moments[:-1][left], moments[1:][left]
        left_ns = int((idle[1] - idle[0]).sum())
        for name, time_ns, count in self._outside_of_work(idle):
            found["", name] = found["", name][0] + time_ns, found["", name][1] + count
            left_ns -= time_ns
        found["", ""] = found["", ""][0] + left_ns, found["", ""][1]
        return found

    def before_steps(self, steps: Steps) -> tuple[HostTime, ...]:
        """Returns what the main thread does before the first step, the longest first."""
        begun = self._begun[self._thread == self._main]
        if not steps.separator or not len(begun):
            return ()
        before = begun.min(keepdims=True), steps.on_host[0][:1]
        times = self.during(before, self._main) if before[0] < before[1] else {}
        ordered = sorted(times.items(), key=lambda item: -item[1][0])
        return tuple(HostTime(*what, num_calls, time_ns * 1e-9) for what, (time_ns, num_calls) in ordered)

    def _outside_of_work(self, idle: Intervals) -> Iterator[tuple[str, int, int]]:
        """Yields the times and numbers of annotations and functions by name, without those inside them."""
        if not len(self._name) or not len(idle[0]):
            return
        own = spent(self._spans, idle)
        inner = self._around >= 0
        np.subtract.at(own, self._around[inner], own[inner].copy())
        num = len(self._names)
        is_counted = self._is_span_counted & (own > 0)
        sums, counts = np.bincount(self._name, own, num), np.bincount(self._name[is_counted], None, num)
        for at in np.flatnonzero(sums > 0).tolist():
            yield self._names[at], int(sums[at]), int(counts[at])

    def _own(self, index: Longs, idle: Intervals) -> Longs:
        """Returns the time of each event in the idle intervals, without that of the events inside it."""
        whole = spent((self._begun[index], self._ended[index]), idle)
        above = self._above[index]
        inner = np.isin(above, index)
        own = whole.copy()
        np.subtract.at(own, np.searchsorted(index, above[inner]), whole[inner])
        return own

    def _add(self, index: Longs, own: Longs, found: dict[tuple[str, str], tuple[int, int]]) -> None:
        is_call, num_callers = index >= self._num_host, np.int64(len(self._callers))
        call = self._call[np.where(is_call, index - self._num_host, -1)]
        caller = self._caller[np.where(is_call, self._above[index], index)]
        pairs, first = np.unique(call * num_callers + caller, return_inverse=True)
        sums = (np.bincount(first, of, len(pairs)).tolist() for of in (own, self._is_counted[index]))
        for pair, time_ns, count in zip(pairs.tolist(), *sums, strict=True):
            what = self._calls[pair // num_callers], self._callers[pair % num_callers]
            found[what] = found[what][0] + int(time_ns), found[what][1] + int(count)


def _outermost(chosen: npt.NDArray[np.bool_], above: Ints) -> Longs:
    """Returns for each event the outermost chosen one that encloses it, or the event itself."""
    place, at = np.arange(len(above)), np.arange(len(above))
    while (known := at >= 0).any():
        place = np.where(known & chosen[at], at, place)
        at = np.where(known, above[at], -1)
    return place
