"""Finds the operator that launched each kernel, and selects the events that the timeline shows by name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ddp_hpc.trace.analysis_results import ANNOTATION, OPERATOR, Kernel, NamedEvent
from ddp_hpc.trace.event_columns import Columns
from ddp_hpc.trace.event_names import STEP, annotated_kind
from ddp_hpc.trace.events_by_kind import OCCUPANCY, RankEvents
from ddp_hpc.trace.intervals import Ints, Longs, parents
from ddp_hpc.trace.kernel_kinds import kernel_category, uses_tensor_cores
from ddp_hpc.trace.step_times import Steps


@dataclass(frozen=True)
class CallTree:
    """The events of the host that enclose other events and launches on their threads, as indices or -1."""

    above: Ints
    """What directly encloses each event of the host."""
    caller: Ints
    """What directly encloses each call of the runtime; a call of the driver is enclosed by what encloses that
    of the runtime around it."""
    is_nested: npt.NDArray[np.bool_]
    """Whether another call encloses a call."""
    launcher: Ints
    """What directly encloses the launch of each event of the device."""

    def device_ns(self, durations: Longs) -> Longs:
        """Returns the time of the kernels that each event of the host and those inside it launched."""
        total, launcher = np.zeros(len(self.above), np.int64), self.launcher
        while (known := launcher >= 0).any():
            launcher, durations = launcher[known], durations[known]
            np.add.at(total, launcher, durations)
            launcher = self.above[launcher]
        return total

    def enclosing(self, at: int) -> list[int]:
        """Returns an event of the host and all that enclose it, the outermost one first."""
        found: list[int] = []
        while at >= 0:
            found.insert(0, at)
            at = int(self.above[at])
        return found

    def path(self, at: int, host: Columns) -> str:
        """Returns the names of an event of the host and all that enclose it, except that of the step."""
        names = [name for _, name in host.names]
        return " > ".join(
            name for one in self.enclosing(at) if not (name := names[host.name[one]]).startswith(STEP)
        )


def call_tree(rank_events: RankEvents, base_us: float, steps: Steps) -> CallTree:
    """Returns the call tree of a rank."""
    host, calls = rank_events.host, rank_events.launches
    launched = steps.device.launches.call if steps.device else np.empty(0, np.int64)
    above = parents(
        np.concatenate([host.thread, calls.thread]),
        np.concatenate([host.start_ns(base_us), calls.start_ns(base_us)]),
        np.concatenate([host.dur_ns(), np.maximum(calls.dur_ns(), 1)]),
    )
    is_nested = above[len(host) :] >= len(host)
    while (is_in_call := above >= len(host)).any():  # the runtime calls the driver
        above[is_in_call] = above[above[is_in_call]]
    caller = above[len(host) :]
    return CallTree(above[: len(host)], caller, is_nested, np.append(caller, np.intc(-1))[launched])


def kernels(
    rank_events: RankEvents, tree: CallTree, chosen: npt.NDArray[np.bool_], most: int
) -> tuple[Kernel, ...]:
    """Returns the times of the chosen kernels by the operators that launched them, the longest first."""
    host, device = rank_events.host, rank_events.device
    callers, names = [*(name for _, name in host.names), ""], [name for _, name in device.names]
    caller = np.append(host.name, len(callers) - 1)[tree.launcher]
    of_pair = device.name * np.int64(len(callers)) + caller
    pairs, index = np.unique(of_pair[chosen], return_inverse=True)
    durations = device.dur_ns()[chosen] * 1e-9
    calls, totals = np.bincount(index), np.bincount(index, durations)
    means = {name: _means(device.values(name)[chosen], durations, index) for name in OCCUPANCY}
    is_amd = any(name.startswith("hip") for _, name in rank_events.launches.names)
    found = []
    for at in np.argsort(-totals, kind="stable")[:most].tolist():
        name, operator = names[pairs[at] // len(callers)], callers[pairs[at] % len(callers)]
        kind = kernel_category(name, operator)
        estimates = {field: None if np.isnan(mean[at]) else float(mean[at]) for field, mean in means.items()}
        # NVIDIA's kernels have warps.
        is_known = is_amd or estimates["warps_per_sm"] is not None
        tensor_cores = float(uses_tensor_cores(name)) if is_known and not name.startswith("Mem") else None
        found.append(
            Kernel(name, operator, kind, int(calls[at]), float(totals[at]), tensor_cores, **estimates)
        )
    return tuple(found)


def _means(values: Any, weights: Any, index: Any) -> Any:
    """Returns the weighted mean of the known values with the same index, or NaN."""
    weights = weights * (values >= 0)
    whole = np.bincount(index, weights)
    return np.divide(
        np.bincount(index, weights * values), whole, out=np.full(len(whole), np.nan), where=whole > 0
    )


def named_events(
    rank_events: RankEvents, base_us: float, zero_s: float, steps: Steps, tree: CallTree, most: int
) -> tuple[NamedEvent, ...]:
    """Returns at most `most` kernels, and as many operators and annotations of the host.

    If there are more, these are those of the step in the middle, and the longest ones of the other steps.
    """
    host, device = rank_events.host, rank_events.device
    begun, took = host.start_ns(base_us), host.dur_ns()
    started, ran = device.start_ns(base_us), device.dur_ns()
    middle = len(steps.numbers) // 2
    first, last = (int(side[middle]) for side in (steps.starts, steps.ends)) if steps.numbers else (0, 0)
    kernels = _choose(ran, (started >= first) & (started < last), most)
    is_preferred = (begun >= first) & (begun < last)
    launcher = tree.launcher[kernels]
    while len(launcher := launcher[launcher >= 0]):
        is_preferred[launcher] = True
        launcher = np.unique(tree.above[launcher])
    is_listed = [not (name.startswith(STEP) or annotated_kind(name)) for _, name in host.names]
    listed = np.flatnonzero(np.array(is_listed, bool)[host.name])
    calls = listed[_choose(took[listed], is_preferred[listed], most)]
    categories, names = zip(*host.names, strict=True) if host.names else ((), ())
    events = []
    for at, start_s, dur_s in _rows(calls, begun, took, zero_s):
        kind = OPERATOR if categories[host.name[at]] == "cpu_op" else ANNOTATION
        around = tree.enclosing(int(tree.above[at])) if kind == OPERATOR else []
        level = sum(categories[host.name[one]] == "cpu_op" for one in around)
        events.append(NamedEvent(kind, names[host.name[at]], start_s, dur_s, level))
    kind_of, kernel_names = cache(kernel_category), [name for _, name in device.names]
    for at, start_s, dur_s in _rows(kernels, started, ran, zero_s):
        callers = [names[host.name[one]] for one in tree.enclosing(int(tree.launcher[at]))]
        kind = kind_of(name := kernel_names[device.name[at]], callers[-1] if callers else "")
        path = " > ".join(caller for caller in callers if not caller.startswith(STEP))
        events.append(NamedEvent(kind, name, start_s, dur_s, callers=path))
    return tuple(events)


def _rows(
    chosen: Longs, starts: Longs, durations: Longs, zero_s: float
) -> Iterator[tuple[int, float, float]]:
    """Returns index, start and duration of the chosen events, in seconds."""
    starts_s, durations_s = zero_s + starts[chosen] * 1e-9, durations[chosen] * 1e-9
    return zip(chosen.tolist(), starts_s.tolist(), durations_s.tolist(), strict=True)


def _choose(durations: Longs, is_preferred: npt.NDArray[np.bool_], most: int) -> Longs:
    """Returns the indices of at most `most` events: the preferred ones, and then the longest ones."""
    return np.sort(np.lexsort((durations, is_preferred))[-most:])
