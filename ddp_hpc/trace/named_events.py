"""Finds the operator that launched each kernel, and selects the events that the timeline shows by name."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ddp_hpc.base.units import format_bytes
from ddp_hpc.trace.device_activity import may_block
from ddp_hpc.trace.event_columns import Events, Numbers
from ddp_hpc.trace.event_names import STEP, annotated_kind
from ddp_hpc.trace.events_by_kind import Recording
from ddp_hpc.trace.intervals import Ints, Longs, parents, spent, union
from ddp_hpc.trace.kernel_kinds import kernel_category, uses_tensor_cores
from ddp_hpc.trace.named_results import (
    ANNOTATION,
    BLOCKING,
    CALL,
    OPERATOR,
    PYTHON,
    Kernel,
    Launch,
    NamedEvent,
)
from ddp_hpc.trace.step_times import Steps

_FILLED = 0.9
"""A Python function that spends this fraction of its time in a single other one is not shown."""
# What torch does around modules, and in decorators.
WRAPPER = re.compile(r"(^|/)torch/(nn/modules/module\.py|(utils/)?_)")
_ADDRESS = re.compile(" at 0x[0-9a-f]+")
_MOST_SAMPLES = 15
_FEWER_FUNCTIONS = 20
"""The ratio of the numbers of operators and of Python functions that are shown, which enclose each other."""


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

    def path(self, at: int, host: Events) -> str:
        """Returns the names of an event of the host and all that enclose it, except that of the step."""
        return joined_names(self.enclosing(at), host)


def joined_names(enclosing: list[int], host: Events) -> str:
    """Returns the names of events that enclose each other, except that of the step."""
    names = [host.names[host.name[one]][1] for one in enclosing]
    return " > ".join(name for name in names if not name.startswith(STEP))


def call_tree(host: Events, calls: Events, steps: Steps) -> CallTree:
    """Returns the call tree of events of the host, and of the calls that launch those of the device."""
    launched = steps.device.launches.call if steps.device else np.empty(0, np.int64)
    above = parents(
        np.concatenate([host.thread, calls.thread]),
        np.concatenate([host.starts, calls.starts]),
        np.concatenate([host.durations, np.maximum(calls.durations, 1)]),
    )
    is_nested = above[len(host) :] >= len(host)
    while (is_in_call := above >= len(host)).any():  # the runtime calls the driver
        above[is_in_call] = above[above[is_in_call]]
    caller = above[len(host) :]
    return CallTree(above[: len(host)], caller, is_nested, np.append(caller, np.intc(-1))[launched])


def kernels(
    recording: Recording, steps: Steps, tree: CallTree, chosen: npt.NDArray[np.bool_], most: int
) -> tuple[Kernel, ...]:
    """Returns the times of the chosen kernels by streams, operators and the shapes of their inputs."""
    host, device = recording.host, recording.device.chosen(chosen)
    operator, shapes = (
        np.append(of, none)[tree.launcher[chosen]]
        for of, none in ((host.name, len(host.names)), (host.fields["shapes"], 0))
    )
    regions = steps.device.region[chosen].tolist() if steps.device else []
    numbers = Numbers[str]()
    region = np.array([numbers[one] for one in regions], np.int64)
    index = np.zeros(len(device), np.int64)
    for part in (device.name, device.fields["config"], device.thread, operator, shapes, region):
        index = np.unique(index * (int(part.max(initial=0)) + 1) + part, return_inverse=True)[1]
    durations, is_copy = device.durations * 1e-9, device.where(lambda category, _: category != "kernel")
    calls, totals = np.bincount(index), np.bincount(index, durations)
    of_kernels, of_collectives = (
        spent(device.intervals(), union(device.intervals(others)))
        for others in (~is_copy, recording.is_collective[chosen])
    )
    running = np.where(is_copy, of_kernels, of_collectives) * 1e-9
    running_s, num_bytes = (np.bincount(index, values) for values in (running, device.fields["bytes"]))
    order = np.argsort(index, kind="stable")
    first = np.searchsorted(index, np.arange(len(calls) + 1), sorter=order)
    means = _means(device.fields["occupancy"], durations, index)
    has_cores = {category.partition("_")[0] for category, _ in recording.launches.names} <= {"cuda"}
    operators, streams = [*(name for _, name in host.names), ""], _streams(device)
    firsts = order[first[:-1]].tolist()
    launchers = [operators[operator[one]] for one in firsts]
    names = [device.names[device.name[one]][1] for one in firsts]
    kinds = _kinds([*zip(names, launchers, strict=True)])
    launched_by = _graph_launches(recording, steps, chosen)
    found = []
    for at in np.argsort(-totals, kind="stable")[:most].tolist():
        own = order[first[at] : first[at + 1]]
        name, launcher, kind = names[at], launchers[at], kinds[at]
        occupancy = None if np.isnan(means[at]) else float(means[at])
        is_kernel = has_cores and not is_copy[own[0]]
        longest, ordered = own[np.argmax(durations[own])], np.sort(durations[own])
        num = min(len(own), _MOST_SAMPLES)
        samples = ordered[(2 * np.arange(num) + 1) * len(own) // (2 * num)]
        found.append(Kernel(
            name, launcher, kind, int(calls[at]), float(totals[at]),
            float(ordered[0]), tuple(samples.tolist()),
            float(ordered[-1]), *steps.place(int(device.starts[longest])), launched_by[own[0]],
            streams[device.thread[own[0]]], bool(is_copy[own[0]]), int(num_bytes[at]), float(running_s[at]),
            recording.shapes[shapes[own[0]]], recording.configs[device.fields["config"][own[0]]],
            uses_tensor_cores(name, kind) if is_kernel else None, occupancy, regions[own[0]],
        ))  # fmt: skip
    return tuple(found)


def _kinds(kernels: Sequence[tuple[str, str]]) -> list[str]:
    """Returns the kinds of kernels, given as names and operators. Without a recorded launch, such as before
    the first step, a kernel has the kind of others with its name.
    """
    kind_of, known = cache(kernel_category), {name: operator for name, operator in kernels if operator}
    return [kind_of(name, operator or known.get(name, "")) for name, operator in kernels]


def _graph_launches(recording: Recording, steps: Steps, chosen: npt.NDArray[np.bool_]) -> list[str]:
    """Returns the name of the call that launched each chosen kernel, if it launches a graph."""
    calls, launches = recording.launches, steps.device.launches if steps.device else None
    if launches is None or not len(calls):
        return [""] * len(recording.device)
    names = [name if "GraphLaunch" in name else "" for _, name in calls.names]
    pairs = zip(calls.name[launches.call[chosen]].tolist(), launches.is_known[chosen].tolist(), strict=True)
    return [names[number] if is_known else "" for number, is_known in pairs]


def _streams(device: Events) -> list[str]:
    """Returns the names of the threads of a device."""
    has_devices = len({process for process, _ in device.threads}) > 1
    names = [
        (process, f"stream {one}" if isinstance(one, int) else str(one)) for process, one in device.threads
    ]
    return [f"device {process} {stream}" if has_devices else stream for process, stream in names]


def _means(values: Any, weights: Any, index: Any) -> Any:
    """Returns the weighted mean of the known values with the same index, or NaN."""
    weights = weights * (values >= 0)
    whole = np.bincount(index, weights)
    return np.divide(
        np.bincount(index, weights * values), whole, out=np.full(len(whole), np.nan), where=whole > 0
    )


def named_events(
    recording: Recording, steps: Steps, tree: CallTree, functions: Events, most: int
) -> tuple[NamedEvent, ...]:
    """Returns at most `most` operators and annotations of the host, as many kernels without collectives, as
    many calls of the runtime that are not inside other calls, and some of modules and of `functions`.

    If there are more, these are those of the step in the middle, and the longest ones of the other steps.
    """
    host, device, calls = recording.host, recording.device, recording.launches
    middle = len(steps.numbers) // 2
    first, last = (int(side[middle]) for side in (steps.starts, steps.ends)) if steps.numbers else (0, 0)
    own = np.flatnonzero(~recording.is_collective)
    is_in_middle = (device.starts >= first) & (device.starts < last)
    kernels = own[_choose(device.durations[own], is_in_middle[own], most)]
    is_preferred, is_launch = (host.starts >= first) & (host.starts < last), np.zeros(len(calls), bool)
    launcher = tree.launcher[kernels]
    while len(launcher := launcher[launcher >= 0]):
        is_preferred[launcher] = True
        launcher = np.unique(tree.above[launcher])
    launched_s: Any = []
    if steps.device:
        launches = steps.device.launches
        is_launch[launches.call[kernels][launches.is_known[kernels]]] = True
        launched_s = np.where(launches.is_known, recording.zero_s + launches.moment * 1e-9, np.inf)[kernels]
    listed = np.flatnonzero(host.where(lambda _, name: not (name.startswith(STEP) or annotated_kind(name))))
    chosen = listed[_choose(host.durations[listed], is_preferred[listed], most)]
    events = []
    for python in (recording.modules, functions):
        longest = np.argsort(python.durations)[-most // _FEWER_FUNCTIONS :]
        for _, (_, name), start_s, dur_s in _rows(python, longest, recording.zero_s):
            events.append(NamedEvent(PYTHON, name, start_s, dur_s))
    for at, (category, name), start_s, dur_s in _rows(host, chosen, recording.zero_s):
        kind, shapes = OPERATOR if category == "cpu_op" else ANNOTATION, host.fields["shapes"][at]
        events.append(NamedEvent(kind, name, start_s, dur_s, details=_inputs(recording, shapes)))
    outer = np.flatnonzero(~tree.is_nested)
    chosen = outer[_choose(calls.durations[outer], is_launch[outer], most)]
    blocks = may_block(calls, device, steps.device.launches if steps.device else None)
    for at, (_, name), start_s, dur_s in _rows(calls, chosen, recording.zero_s):
        kind = BLOCKING if blocks[at] else CALL
        events.append(NamedEvent(kind, name, start_s, dur_s, tree.path(int(tree.caller[at]), host)))
    rows = [*_rows(device, kernels, recording.zero_s)]
    operators, launchers = [*(name for _, name in host.names), ""], np.append(host.name, len(host.names))
    kinds = _kinds([(name, operators[launchers[tree.launcher[at]]]) for at, (_, name), *_ in rows])
    for (at, (_, name), start_s, dur_s), kind, moment_s in zip(rows, kinds, launched_s, strict=True):
        caller = int(tree.launcher[at])
        config, occupancy = recording.configs[device.fields["config"][at]], device.fields["occupancy"][at]
        inputs = _inputs(recording, host.fields["shapes"][caller]) if caller >= 0 else ""
        details = ", ".join(filter(None, (inputs, _details(config, float(occupancy)))))
        path = tree.path(caller, host)
        events.append(NamedEvent(kind, name, start_s, dur_s, path, float(moment_s), details))
    return tuple(events)


def own_functions(recording: Recording) -> Events:
    """Returns the Python functions of threads that run operators or call the device's runtime, which others
    such as those of progress bars do not. The methods of all objects of a class have one name.
    """
    functions, names = recording.functions, Numbers[tuple[str, str]]()
    numbers = [names[category, _ADDRESS.sub("", name)] for category, name in functions.names]
    own = np.unique(np.concatenate([recording.host.thread, recording.launches.thread]))
    functions = functions.chosen(np.isin(functions.thread, own))
    return replace(functions, names=tuple(names), name=np.array(numbers, np.intc)[functions.name])


def visible_functions(functions: Events) -> Events:
    """Returns the functions without those that only call one other function."""
    above = parents(functions.thread, functions.starts, functions.durations)
    return functions.chosen(~calls_only_one(functions.durations, above))


def calls_only_one(durations: Longs, above: Ints) -> npt.NDArray[np.bool_]:
    """Returns whether each event mostly calls a single other one; `above` is what encloses them."""
    return np.not_equal(only_callee(durations, above), np.arange(len(above)))


def only_callee(durations: Longs, above: Ints) -> Longs:
    """Returns the single event in which each one spends most of its time, or the event itself."""
    found = np.arange(len(above))
    inner = np.flatnonzero((above >= 0) & (durations >= _FILLED * durations[above]))
    found[above[inner]] = inner
    return found


def _rows(
    events: Events, chosen: Longs, zero_s: float
) -> Iterator[tuple[int, tuple[str, str], float, float]]:
    """Returns index, category and name, start and duration of the chosen events, in seconds."""
    names = [events.names[number] for number in events.name[chosen]]
    starts_s, durations_s = zero_s + events.starts[chosen] * 1e-9, events.durations[chosen] * 1e-9
    return zip(chosen.tolist(), names, starts_s.tolist(), durations_s.tolist(), strict=True)


def _choose(durations: Longs, is_preferred: npt.NDArray[np.bool_], most: int) -> Longs:
    """Returns the indices of at most `most` events: the preferred ones, and then the longest ones."""
    return np.sort(np.lexsort((durations, is_preferred))[-most:])


def _inputs(recording: Recording, shapes: int) -> str:
    return f"inputs: {recording.shapes[shapes]}" if shapes else ""


@lru_cache(10_000)
def _details(launch: Launch, occupancy: float) -> str:
    sizes = {"grid": launch.grid, "block": launch.block}
    parts = [f"{name} {' x '.join(map(str, size))}" for name, size in sizes.items() if size]
    parts += [f"{launch.registers} registers per thread"] * (launch.registers > 0)
    parts += [f"{format_bytes(launch.shared_bytes)} of shared memory"] * (launch.shared_bytes > 0)
    return ", ".join([*parts, *[f"achieved occupancy {occupancy:g}% (estimate)"] * (occupancy >= 0)])
