"""Finds the operator that launched each kernel, and selects the events that the timeline shows by name."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ddp_hpc.trace.analysis_results import ANNOTATION, OPERATOR, Kernel, NamedEvents
from ddp_hpc.trace.event_names import STEP, annotated_kind
from ddp_hpc.trace.events_by_kind import RankEvents
from ddp_hpc.trace.intervals import Ints, Longs, parents
from ddp_hpc.trace.kernel_kinds import kernel_category
from ddp_hpc.trace.step_times import Steps

MOST_LEVELS = 4
"""Operators that more others enclose are not in the timeline."""


@dataclass(frozen=True)
class CallTree:
    """The events of the host that enclose other events and launches on their threads, as indices or -1."""

    above: Ints
    """What directly encloses each event of the host."""
    launcher: Ints
    """What directly encloses the launch of each event of the device."""

    def device_ns(self, durations: Longs) -> tuple[Longs, Longs]:
        """Returns the time of the kernels that each event of the host launched itself, and with callees."""
        own, total = np.zeros((2, len(self.above)), np.int64)
        np.add.at(own, self.launcher[self.launcher >= 0], durations[self.launcher >= 0])
        launcher = self.launcher
        while (known := launcher >= 0).any():
            launcher, durations = launcher[known], durations[known]
            np.add.at(total, launcher, durations)
            launcher = self.above[launcher]
        return own, total


def call_tree(rank_events: RankEvents, base_us: float, steps: Steps) -> CallTree:
    """Returns the call tree of a rank."""
    host, calls = rank_events.host, rank_events.launches
    launched = steps.device.launches.call if steps.device else np.empty(0, np.int64)
    used, index = np.unique(launched[launched >= 0], return_inverse=True)
    above = parents(
        np.concatenate([host.thread, calls.thread[used]]),
        np.concatenate([host.start_ns(base_us), calls.start_ns(base_us)[used]]),
        np.concatenate([host.dur_ns(), np.maximum(calls.dur_ns()[used], 1)]),
    )
    while (is_in_call := above >= len(host)).any():  # the runtime calls the driver
        above[is_in_call] = above[above[is_in_call]]
    launcher = np.full(len(launched), -1, np.intc)
    launcher[launched >= 0] = above[len(host) :][index]
    return CallTree(above[: len(host)], launcher)


def kernels(rank_events: RankEvents, tree: CallTree, most: int) -> tuple[Kernel, ...]:
    """Returns the times of kernels and copies by the operators that launched them, the longest first."""
    host, device = rank_events.host, rank_events.device
    callers, names = [*(name for _, name in host.names), ""], [name for _, name in device.names]
    caller = np.append(host.name, len(callers) - 1)[tree.launcher]
    pairs, index = np.unique(device.name * np.int64(len(callers)) + caller, return_inverse=True)
    calls, totals = np.bincount(index), np.bincount(index, device.dur_ns() * 1e-9)
    found = []
    for at in np.argsort(-totals, kind="stable")[:most].tolist():
        name, operator = names[pairs[at] // len(callers)], callers[pairs[at] % len(callers)]
        kind = kernel_category(name, operator)
        found.append(Kernel(name, operator, kind, int(calls[at]), float(totals[at])))
    return tuple(found)


def named_events(
    rank_events: RankEvents, base_us: float, zero_s: float, steps: Steps, tree: CallTree, most: int
) -> NamedEvents:
    """Returns at most `most` kernels, and as many operators and annotations of the host.

    Those of the step in the middle come first, and then the longest ones of the other steps.
    """
    host, device = rank_events.host, rank_events.device
    (begun, lasted), (started, ran) = ((each.start_ns(base_us), each.dur_ns()) for each in (host, device))
    middle = len(steps.numbers) // 2
    first, last = (int(side[middle]) for side in (steps.starts, steps.ends)) if steps.numbers else (0, 0)
    chosen = _choose(ran, (started >= first) & (started < last), most)
    is_preferred = (begun >= first) & (begun < last)
    launcher = tree.launcher[chosen]
    while len(launcher := launcher[launcher >= 0]):
        is_preferred[launcher] = True
        launcher = np.unique(tree.above[launcher])
    is_operator = np.array([category == "cpu_op" for category, _ in host.names], bool)[host.name]
    is_listed = [not (name.startswith(STEP) or annotated_kind(name)) for _, name in host.names]
    level = _levels(tree, is_operator)
    shown = np.flatnonzero(np.array(is_listed, bool)[host.name] & (lasted > 0) & (level < MOST_LEVELS))
    calls = shown[_choose(lasted[shown], is_preferred[shown], most)]
    launches = steps.device.launches if steps.device else None
    operator = {kernel.name: kernel.operator for kernel in reversed(kernels(rank_events, tree, len(ran)))}
    kinds = [OPERATOR if category == "cpu_op" else ANNOTATION for category, _ in host.names]
    return NamedEvents(
        names=tuple(name for _, name in (*host.names, *device.names)),
        kinds=(*kinds, *(kernel_category(name, operator[name]) for _, name in device.names)),
        name=np.append(host.name[calls], device.name[chosen] + len(host.names)),
        start_s=zero_s + np.append(begun[calls], started[chosen]) * 1e-9,
        dur_s=np.append(lasted[calls], ran[chosen]) * 1e-9,
        level=np.append(np.where(is_operator, level, 0)[calls], np.zeros(len(chosen), np.intc)),
        launch_s=zero_s + np.append(begun[calls], launches.moment[chosen] if launches else []) * 1e-9,
        thread=np.append(host.thread[calls], launches.thread[chosen] if launches else []).astype(np.intc),
        num_omitted=len(shown) - len(calls) + len(ran) - len(chosen),
    )


def _choose(durations: Longs, is_preferred: npt.NDArray[np.bool_], most: int) -> Longs:
    """Returns the indices of at most `most` events: the preferred ones, and then the longest ones."""
    return np.sort(np.lexsort((durations, is_preferred))[-most:])


def _levels(tree: CallTree, is_operator: npt.NDArray[np.bool_]) -> Ints:
    """Returns the number of operators that enclose each event of the host."""
    level, above = np.zeros(len(tree.above), np.intc), tree.above
    while (known := above >= 0).any():
        level += known & is_operator[above]
        above = np.where(known, tree.above[above], -1)
    return level
