"""Sums up what the host and the device do in each annotation and in each module of a program."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ddp_hpc.trace import event_names as names
from ddp_hpc.trace.analysis_results import Region
from ddp_hpc.trace.device_activity import is_inside
from ddp_hpc.trace.event_columns import Events, Numbers
from ddp_hpc.trace.events_by_kind import Recording
from ddp_hpc.trace.intervals import Ints, Longs, index_at, parents
from ddp_hpc.trace.named_events import CallTree, call_tree
from ddp_hpc.trace.step_times import Steps

RECOMPUTED = "recomputation (activation checkpointing)"
"""The name of the forward operators that autograd runs again."""
_CHECKPOINT = "CheckpointFunctionBackward"
_MOST_REGIONS = 1000
_INSTANCE = re.compile(r"(?<=^nn\.Module: )(\w+?)_\d+$")


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
    classes: Numbers[str] = Numbers()
    class_of = np.array([classes[_INSTANCE.sub(r"\1", name)] for _, name in regions.names], np.intc)
    group = class_of[regions.name]
    is_in_steps = steps.contain_on_host(regions.starts)
    is_counted = _is_outermost(group, tree.above) & is_in_steps

    def summed(values: npt.NDArray[Any]) -> list[float]:
        found: list[float] = np.bincount(group[is_counted], values[is_counted] * 1.0, len(classes)).tolist()
        return found

    columns = [summed(np.ones(len(regions))), summed(regions.durations * 1e-9)]
    modules = _longest_modules(regions, class_of, _is_outermost(regions.name, tree.above) & is_in_steps)
    if activity := steps.device:
        durations = recording.device.durations * activity.is_counted
        idle, gaps = np.zeros(len(durations), np.int64), activity.gaps
        ended = (gaps.event >= 0) & (index_at((steps.starts, steps.ends), gaps.begins) >= 0)
        idle[gaps.event[ended]] = (gaps.ends - gaps.begins)[ended]
        columns.append(summed(tree.device_ns(activity.is_counted.astype(np.int64))))
        times = (durations * ~recording.is_collective, durations * recording.is_collective, idle)
        columns += [summed(tree.device_ns(values) * 1e-9) for values in times]
    found = [
        Region(name, int(num_calls), total_s, *module, *(int(own[0]), *own[1:]) if own else ())
        for (name, *module), num_calls, total_s, *own in zip(modules, *columns, strict=True)
        if num_calls
    ]
    return tuple(sorted(found, key=lambda one: (-one.device_s, -one.total_s))[:_MOST_REGIONS])


def _longest_modules(
    regions: Events, class_of: Ints, is_counted: npt.NDArray[np.bool_]
) -> list[tuple[str, str, float, int]]:
    """Returns for each class its name, the module that takes longest on the host, its time, and the number of
    modules. A class of a single module has the name of this module.
    """
    totals = np.bincount(regions.name[is_counted], regions.durations[is_counted] * 1e-9, len(regions.names))
    found = []
    for number in range(int(class_of.max(initial=-1)) + 1):
        called = np.flatnonzero((class_of == number) & (totals > 0))
        longest = int(called[totals[called].argmax()]) if len(called) else int(np.argmax(class_of == number))
        name = regions.names[longest][1]
        several = (name, float(totals[longest]), len(called)) if len(called) > 1 else ("", 0.0, len(called))
        found.append((_INSTANCE.sub(r"\1", name) if len(called) > 1 else name, *several))
    return found


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


def _is_outermost(name: Ints, above: Ints) -> npt.NDArray[np.bool_]:
    """Returns for each region whether no region of the same name is around it."""
    outermost, around = np.ones(len(name), bool), above
    while (known := around >= 0).any():
        outermost &= ~known | (name[around] != name)
        around = np.where(known, above[around], -1)
    return outermost
