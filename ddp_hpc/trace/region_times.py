"""Sums up what the host and the device do in each annotation and in each module of a program."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ddp_hpc.trace import event_names as names
from ddp_hpc.trace.device_activity import is_inside
from ddp_hpc.trace.event_columns import Events, Numbers
from ddp_hpc.trace.events_by_kind import Recording
from ddp_hpc.trace.intervals import Ints, Longs, index_at, parents
from ddp_hpc.trace.named_events import WRAPPER, CallTree, call_tree, calls_only_one
from ddp_hpc.trace.named_results import Region
from ddp_hpc.trace.step_times import Steps

RECOMPUTED = "recomputation (activation checkpointing)"
"""The name of the forward operators that autograd runs again."""
_CHECKPOINT = "CheckpointFunctionBackward"
_MOST_REGIONS = 1000
_NODES = "nodes of autograd (backward)"
_MODULE = re.compile(r"(nn\.Module: .*)_\d+")
_SUMMED = ("num_calls", "total_s", "num_kernels", "device_s", "comm_s", "idle_s")


def region_times(recording: Recording, steps: Steps) -> tuple[Region, ...]:
    """Returns the regions of a rank, those with the longest time of kernels first."""
    host, is_node = recording.host_and_modules, recording.host.where(names.is_node)
    regions = host.chosen(host.where(_is_region)).joined(_recomputed(recording, is_node))
    tree = call_tree(regions, recording.launches, steps)
    is_step = recording.host.where(lambda _, name: steps.separator and name.startswith(steps.separator))
    threads = recording.host.thread[is_step] if is_step.any() else regions.thread
    autograd = np.setdiff1d(recording.host.thread[is_node], threads)
    own = threads[np.isin(threads, autograd, invert=True)]
    if len(own):
        tree = _with_callers(tree, regions, steps, autograd, int(np.bincount(own).argmax()))
    is_counted, depths = _ancestry(regions.name, tree.above)
    groups: defaultdict[tuple[str, int], list[Region]] = defaultdict(list)
    depth_of = np.full(len(regions.names), len(regions))
    np.minimum.at(depth_of, regions.name, depths)
    for region, depth in zip(_sums(recording, steps, tree, regions, is_counted), depth_of, strict=True):
        if region.num_calls:
            of_class = _MODULE.fullmatch(region.name)
            groups[(of_class[1], int(depth)) if of_class else (region.name, 0)].append(region)
    found = [
        _joined(*key, own, len(steps.numbers)) if _MODULE.fullmatch(own[0].name) else own[0]
        for key, own in groups.items()
    ]
    return tuple(sorted(found, key=lambda one: (-one.device_s, -one.total_s))[:_MOST_REGIONS])


def function_times(recording: Recording, steps: Steps, functions: Events) -> tuple[Region, ...]:
    """Returns the Python functions of a rank, without those that mostly only call another function, a module
    or an operator, and without torch's wrappers.
    """
    if not len(functions):
        return ()
    events = functions.joined(recording.modules).joined(recording.host)
    tree = call_tree(events, recording.launches, steps)
    calls_one = calls_only_one(events.durations, tree.above)
    own_ns, passed_ns = (
        np.bincount(events.name, events.durations * of, len(events.names)) for of in (True, calls_one)
    )
    is_shown = (passed_ns <= own_ns / 2)[: len(functions.names)]
    is_shown &= [WRAPPER.search(name) is None for _, name in functions.names]
    is_counted = _ancestry(events.name, tree.above)[0] & steps.contain_on_host(events.starts)
    sums = zip(is_shown, _sums(recording, steps, tree, events, is_counted), strict=False)
    found = [one for is_one, one in sums if is_one and one.num_calls]
    return tuple(sorted(found, key=lambda one: -max(one.device_s, one.total_s))[:_MOST_REGIONS])


def host_threads(recording: Recording, steps: Steps, tree: CallTree) -> tuple[Region, ...]:
    """Returns the threads of the host, with the operators and annotations that no others enclose."""
    host, numbers = recording.host, Numbers[str]()
    is_step = np.append(host.where(lambda _, name: name.startswith(names.STEP)), True)
    is_outermost = is_step[tree.above] & ~is_step[:-1] & steps.contain_on_host(host.starts)
    is_outermost &= host.where(lambda _, name: not names.annotated_kind(name))  # which has a table of its own
    labels = np.array([numbers[_NODES if names.is_node(*pair) else pair[1]] for pair in host.names], np.int64)
    pairs = (host.thread * np.int64(len(numbers)) + labels[host.name])[is_outermost]
    pairs, at = np.unique(pairs, return_inverse=True)
    by_time = sorted(zip(np.bincount(at, host.durations[is_outermost]).tolist(), pairs.tolist(), strict=True))
    longest = {pair // len(numbers): [*numbers][pair % len(numbers)] for _, pair in by_time}
    threads = tuple(("", f"thread {thread}") for _, thread in host.threads)
    found = _sums(recording, steps, tree, replace(host, names=threads, name=host.thread), is_outermost)
    return tuple(replace(found[thread], longest_at=longest[thread]) for thread in sorted(longest))


def _sums(
    recording: Recording, steps: Steps, tree: CallTree, events: Events, is_counted: npt.NDArray[np.bool_]
) -> list[Region]:
    """Returns the sums over the counted events of each name: on the host, over those that begin in a step."""
    size, is_inside = len(events.names), is_counted & steps.contain_on_host(events.starts)
    durations_s = events.durations[is_inside] * 1e-9
    columns: list[Any] = [np.bincount(events.name[is_inside], of, size) for of in (None, durations_s)]
    name = events.name[is_counted]
    if activity := steps.device:
        durations = recording.device.durations * activity.is_counted
        idle, gaps = np.zeros(len(durations), np.int64), activity.gaps
        ended = (gaps.event >= 0) & (index_at((steps.starts, steps.ends), gaps.begins) >= 0)
        idle[gaps.event[ended]] = (gaps.ends - gaps.begins)[ended]
        columns.append(np.bincount(name, tree.device_ns(activity.is_counted * np.int64(1))[is_counted], size))
        times = (durations * ~recording.is_collective, durations * recording.is_collective, idle)
        columns += [np.bincount(name, tree.device_ns(values)[is_counted] * 1e-9, size) for values in times]
    rows = zip(events.names, *(column.tolist() for column in columns), strict=True)
    return [
        Region(one, int(num_calls), total_s, *(int(of[0]), *of[1:]) if of else ())
        for (_, one), num_calls, total_s, *of in rows
    ]


def _joined(name: str, depth: int, modules: list[Region], num_steps: int) -> Region:
    """Returns the sum of the modules of a class that are called at the same depth."""
    longest = max(modules, key=lambda one: one.total_s)
    sums = {field: sum(getattr(one, field) for one in modules) for field in _SUMMED}
    at, longest_s = longest.name.removeprefix("nn.Module: "), longest.total_s / num_steps
    return Region(name, **sums, depth=depth, num=len(modules), longest_s=longest_s, longest_at=at)


def _is_region(category: str, name: str) -> bool:
    if category == "cpu_op":
        return names.region_of(name) is not None and not names.is_node(category, name)
    return not (name.startswith(names.STEP) or names.annotated_kind(name))


def _recomputed(recording: Recording, is_node: npt.NDArray[np.bool_]) -> Events:
    """Returns the calls of modules inside autograd's nodes, and of checkpointed functions: what a node of
    `torch.utils.checkpoint` does before it runs the nodes of the function.
    """
    nodes = recording.host.chosen(is_node)
    checkpoints = nodes.chosen(nodes.where(lambda _, name: name == _CHECKPOINT))
    ends = checkpoints.ends.copy()
    for thread in np.unique(checkpoints.thread):
        mine = checkpoints.thread == thread
        starts = np.append(np.sort(nodes.starts[nodes.thread == thread]), ends[mine].max())
        following = starts[np.searchsorted(starts[:-1], checkpoints.starts[mine], side="right")]
        ends[mine] = np.minimum(ends[mine], following)
    modules = recording.modules.chosen(is_inside(recording.modules, recording.host, is_node))
    found = replace(checkpoints, ends=ends, fields={}).joined(modules)
    return replace(found, names=(("", RECOMPUTED),), name=np.zeros_like(found.name))


def _with_callers(tree: CallTree, regions: Events, steps: Steps, autograd: Ints, caller: int) -> CallTree:
    """Returns the tree in which the regions of the calling thread enclose what autograd's threads do."""

    def region_at(moments: Longs) -> Ints:
        distinct, at = np.unique(moments, return_inverse=True)
        around = parents(
            np.append(regions.thread, np.full(len(distinct), caller)),
            np.append(regions.starts, distinct),
            np.append(regions.durations, np.ones_like(distinct)),
        )
        return around[len(regions) :][at]

    above, launcher = tree.above.copy(), tree.launcher.copy()
    outermost = (above < 0) & np.isin(regions.thread, autograd)
    above[outermost] = region_at(regions.starts[outermost])
    if steps.device:
        launches = steps.device.launches
        lost = (launcher < 0) & np.isin(launches.thread, autograd)
        launcher[lost] = region_at(launches.moment[lost])
    return replace(tree, above=above, launcher=launcher)


def _ancestry(name: Ints, above: Ints) -> tuple[npt.NDArray[np.bool_], Longs]:
    """Returns for each region whether no region of the same name is around it, and how many are around it."""
    outermost, depth, around = np.ones(len(name), bool), np.zeros(len(name), np.int64), above
    while (known := around >= 0).any():
        outermost &= ~known | (name[around] != name)
        depth += known
        around = np.where(known, above[around], -1)
    return outermost, depth
