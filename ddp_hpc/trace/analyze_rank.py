"""Reads and analyzes the trace of one rank."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ddp_hpc.trace.analysis_results import Collective, RankTrace, Step
from ddp_hpc.trace.blocking_calls import blocking_calls
from ddp_hpc.trace.device_summary import memories, summarize
from ddp_hpc.trace.event_columns import MOST_EVENTS, Numbers
from ddp_hpc.trace.event_names import ALL_STEPS, SHARED_KINDS, STEP, UPDATE, annotated_kind, runs_on_host
from ddp_hpc.trace.events_by_kind import Collector, Message, Recording
from ddp_hpc.trace.host_waits import host_waits
from ddp_hpc.trace.intervals import NO_INTERVALS, few, spent
from ddp_hpc.trace.model_input import first_input, metadata
from ddp_hpc.trace.named_events import (
    CallTree,
    call_tree,
    joined_names,
    kernels,
    named_events,
    own_functions,
    visible_functions,
)
from ddp_hpc.trace.named_results import NamedEvent, Op
from ddp_hpc.trace.parse_events import Reading, read_events
from ddp_hpc.trace.region_times import function_times, host_threads, region_times
from ddp_hpc.trace.slow_steps import slow_steps
from ddp_hpc.trace.step_times import Steps, measure

_MOST_SPANS, _MOST_BUSY = 50_000, 1000
"""Limits of the intervals of a region in the timeline: on the host, and on a device."""
_NOTED_SHARE = 0.01
_AS_OTHER = "its kernels count as other computation"
_MOST_OPS, _MOST_KERNELS = 1000, 5000
_MOST_RANKS = 1_000_000
_FAR_NS = 2**63
_IN_NAME = re.compile(r"rank[-_]?(\d+)(?:[-_]of[-_](\d+))?|(\d+)[-_]of[-_](\d+)", re.IGNORECASE)


def read_rank(path: Path, most_named: int = 30_000) -> RankTrace:
    """Reads the trace of one rank. The rank is -1 if neither the trace nor the file name contains it.

    `most_named` limits the kernels, and also the operators, that the timeline shows by name.

    Raises:
        OSError: the file cannot be opened.
    """
    reading, collector, world_size = Reading(), Collector(), 0
    for events in read_events(path, reading):
        world_size = world_size or _place(path, reading.head)[1]
        collector.add(events, world_size)
    rank, world_size = _place(path, reading.head)
    clock_ns = _zero_ns(reading.head)
    recording = collector.recording(clock_ns)
    steps = measure(recording)
    tree = call_tree(recording.host, recording.launches, steps)
    functions = own_functions(recording)
    python = visible_functions(functions)
    waits, gaps, startup = host_waits(recording, steps, tree, functions)
    first, num_samples = first_input(recording, steps)
    notes = reading.notes + (_notes(recording, steps, most_named) if reading.num_events else [])
    host = reading.head.get("host_name")
    host = host if isinstance(host, str) else ""
    counted = steps.device.is_counted if steps.device else np.empty(0, bool)
    return RankTrace(
        rank=rank,
        world_size=world_size,
        path=str(path),
        host=host,
        device=_device(recording, reading.head),
        steps=_steps(steps, recording.zero_s),
        collectives=_collectives(recording, steps, tree),
        ops=_ops(recording, tree, counted, steps.contain_on_host(recording.host.starts)),
        kernels=kernels(recording, steps, tree, counted, _MOST_KERNELS),
        regions=region_times(recording, steps),
        threads=host_threads(recording, steps, tree),
        functions=function_times(recording, steps, functions),
        slow_steps=slow_steps(recording, steps, tree),
        host_s=steps.host_s(),
        memory=memories(recording, steps, tree),
        num_events=recording.num_events,
        notes=tuple(notes),
        process=_process(recording, host),
        **(_device_properties(recording, reading.head) if len(recording.device) else {}),
        is_cut_off=reading.is_cut_off,
        **summarize(recording, steps),
        host_waits=waits,
        gaps=gaps,
        startup=startup,
        blocking_calls=blocking_calls(recording, steps, tree) if steps.numbers else (),
        clock_ns=clock_ns,
        named=(*_spans(steps, recording.zero_s), *named_events(recording, steps, tree, python, most_named)),
        first_input=first,
        num_samples=num_samples,
        metadata=metadata(reading.head, recording),
        steps_from=steps.separator,
        is_ring=_is_ring(reading.head.get("distributedInfo")),
    )


def _steps(steps: Steps, zero_s: float) -> tuple[Step, ...]:
    on_host = zip(*(((side - steps.starts) * 1e-9).tolist() for side in steps.on_host), strict=True)
    columns = zip(steps.numbers, steps.starts.tolist(), steps.times, on_host, strict=True)
    return tuple(Step(number, zero_s + start * 1e-9, times, host) for number, start, times, host in columns)


def _is_ring(info: Any) -> bool:
    """Returns whether the process groups of a trace are gloo's, and contain all ranks or only one."""
    if not isinstance(info, dict) or info.get("backend") != "gloo":
        return False
    groups = info.get("pg_config")
    return isinstance(groups, list) and all(
        isinstance(group, dict) and group.get("pg_size") in (1, info.get("world_size")) for group in groups
    )


def _place(path: Path, head: dict[str, Any]) -> tuple[int, int]:
    """Returns rank and world size from the trace or, if it does not contain them, from the file name."""
    info = head.get("distributedInfo")
    match = _IN_NAME.search(path.name)
    in_trace = [(info.get("rank"), info.get("world_size") or 0)] if isinstance(info, dict) else []
    in_name = [(int(match[1] or match[3]), int(match[2] or match[4] or 0))] if match else []
    for rank, size in in_trace + in_name:
        if isinstance(rank, int) and isinstance(size, int) and 0 <= rank < _MOST_RANKS >= size >= 0:
            return int(rank), size
    return -1, 0


def _zero_ns(head: dict[str, Any]) -> int:
    """Returns the time to which timestamps are relative: Kineto's `baseTimeNanoseconds`, 0 in old traces."""
    base = head.get("baseTimeNanoseconds")
    return base if isinstance(base, int) and abs(base) < _FAR_NS else 0


def _device(recording: Recording, head: dict[str, Any]) -> str:
    runtimes = {category.partition("_")[0] for category, _ in recording.launches.names} - {"cuda"}
    if runtimes:  # xpu_runtime, mtia_runtime; that of ROCm is named cuda_runtime
        return min(runtimes)
    if not len(recording.device):
        return "cpu"
    kinds = {name.partition(":")[0] for _, name in recording.memory.names} - {"cpu"}
    return next(iter(sorted(kinds)), "xpu" if "xpu" in str(head.get("deviceProperties")).lower() else "cuda")


def _process(recording: Recording, host: str) -> str:
    """Returns host and process ID of the recorded program, or an empty string if its events lack them."""
    pid = next((pid for pid, _ in recording.host.threads), None)
    return f"{host}/{pid}" if isinstance(pid, int) and len(recording.host) else ""


def _device_properties(recording: Recording, head: dict[str, Any]) -> dict[str, Any]:
    """Returns the product names, the largest number of SMs, and the smallest memory of the host's devices."""
    properties = head.get("deviceProperties")
    devices = [one for one in properties if isinstance(one, dict)] if isinstance(properties, list) else []
    names = {name for one in devices if isinstance(name := one.get("name"), str) and name}
    if any(name.startswith("hip") for _, name in recording.launches.names):
        names = names or {"AMD GPU"}  # ROCm's device type is cuda, too
    sms = [number for one in devices if isinstance(number := one.get("numSms"), int)]
    sizes = [size for one in devices if isinstance(size := one.get("totalGlobalMem"), int)]
    return {
        "device_name": ", ".join(sorted(names)),
        "num_sms": max(sms, default=0),
        "memory_bytes": min(sizes, default=0),
    }


def _collectives(recording: Recording, steps: Steps, tree: CallTree) -> tuple[Collective, ...]:
    host, device = recording.host, recording.device
    events, chosen = device, recording.is_collective
    if not chosen.any():
        events, chosen = host, host.where(lambda kind, name: kind != "cpu_op" and runs_on_host(name))
    at = np.flatnonzero(chosen)
    at = at[np.argsort(events.starts[at], kind="stable")]
    messages = [recording.messages[number] for number in events.fields["message"][at]]
    kernels, blocks, callers, queued = [""] * len(at), [0] * len(at), [""] * len(at), [math.inf] * len(at)
    if events is device and steps.device:
        blocks = [math.prod(recording.configs[i].grid or (0,)) for i in device.fields["config"][at]]
        kernels = [device.names[number][1] for number in device.name[at]]
        for i, launcher in enumerate(tree.launcher[at].tolist()):
            enclosing = tree.enclosing(launcher)
            callers[i] = joined_names(enclosing, host)
            around = host.fields["message"][enclosing]
            for number in around[around >= 0][-1:]:
                messages[i] = _annotated(messages[i], recording.messages[number])
        launches = steps.device.launches
        since_s = (device.starts[at] - launches.moment[at]) * 1e-9
        queued = np.where(launches.is_known[at], since_s, np.inf).tolist()
    starts, durations = events.starts[at], events.durations[at] * 1e-9
    exposed = durations - spent((starts, events.ends[at]), steps.computing) * 1e-9
    times = (recording.zero_s + starts * 1e-9).tolist(), durations.tolist(), steps.numbers_at(starts)
    rows = zip(messages, *times, exposed.tolist(), kernels, blocks, callers, queued, strict=True)
    return tuple(Collective(*message, *row) for message, *row in rows)


def _annotated(kernel: Message, annotation: Message) -> Message:
    """Returns the message of a kernel with what only the innermost annotation around its launch says: the
    arguments of kernels in older traces contain neither the collective nor its size.
    """
    if kernel.bytes:
        return kernel
    kind = annotation.kind if kernel.kind in SHARED_KINDS else kernel.kind
    return kernel._replace(kind=kind, bytes=annotation.bytes if kind == annotation.kind else 0)


def _spans(steps: Steps, zero_s: float) -> list[NamedEvent]:
    spans = []
    for region, intervals in steps.regions.items():
        most = _MOST_BUSY if steps.device and region != "data" else _MOST_SPANS
        for start, end in np.transpose(few(intervals, most)).tolist():
            spans.append(NamedEvent(region, region, zero_s + start * 1e-9, (end - start) * 1e-9))
    return sorted(spans, key=lambda span: span.start_s)


def _ops(
    recording: Recording, tree: CallTree, kernels: npt.NDArray[np.bool_], chosen: npt.NDArray[np.bool_]
) -> tuple[Op, ...]:
    """Returns the chosen operators by self time, computed as in torch's key averages; tests/trace compares
    the two. `kernels` are the events of the device that count.
    """
    host, device = recording.host, recording.device
    # All steps (`ProfilerStep#3`) are one entry. Collectives are omitted, since they have a separate table.
    numbers: Numbers[str] = Numbers()
    names = [numbers[ALL_STEPS if name.startswith(STEP) else name] for _, name in host.names]
    key, durations, above = np.array(names, np.intc)[host.name], host.durations, tree.above
    inner = np.flatnonzero(above >= 0).astype(np.intc)
    own = durations.copy()
    np.subtract.at(own, above[inner], durations[inner])
    # An operator whose only child has the same name counts as one call (torch: EventList._remove_dup_nodes).
    num_children = np.bincount(above[inner], minlength=len(above)).astype(np.intc)
    duplicates = inner[(key[above[inner]] == key[inner]) & (num_children[above[inner]] == 1)]
    counted = chosen.copy()
    counted[duplicates] = False
    size = len(numbers)
    calls = np.bincount(key[counted], minlength=size)
    totals = np.bincount(key[counted], durations[counted] * 1e-9, size)
    selves = np.bincount(key, own * chosen * 1e-9, size)
    device_ns = tree.device_ns(device.durations * kernels)
    device_totals = np.bincount(key[counted], device_ns[counted] * 1e-9, size)
    ops = [
        Op(name, int(calls[i]), *(float(of[i]) for of in (totals, selves, device_totals)))
        for name, i in numbers.items()
        if calls[i] and not annotated_kind(name)
    ]
    return tuple(sorted(ops, key=lambda op: -op.self_s)[:_MOST_OPS])


def _notes(recording: Recording, steps: Steps, most_named: int) -> list[str]:
    notes = []
    if recording.num_dropped:
        notes.append(
            f"{recording.num_dropped} events after the first {MOST_EVENTS} of their kind "
            "were dropped, so their times are missing"
        )
    if not steps.numbers:
        notes.append("the trace contains no operators, kernels or regions")
    elif steps.separator == UPDATE:
        notes.append(
            f"profiler.step() was not called, so a step lasts from the end of one {UPDATE} to that of the "
            "next, and the time before the first one is not counted"
        )
    elif not steps.separator:
        from_kernel = (
            ", from the start of the first kernel or copy to the end of the last," if steps.device else ""
        )
        notes.append(
            f"profiler.step() was not called, so the whole recording{from_kernel} is treated as one step"
        )
    has_forward = len(steps.regions.get("forward", NO_INTERVALS)[0]) > 0
    if (
        steps.device
        and not len(steps.regions_on_host["forward"][0])
        and (has_forward or any(of.other_s for of in steps.times))
    ):
        counted = "what is launched in a step before its backward pass counts as forward"
        notes.append(
            f"the forward pass is not annotated, so {counted if has_forward else _AS_OTHER}; mark it with "
            'record_function("forward")'
        )
    if recording.lacks_device:
        notes.append(
            "calls to the device's runtime were recorded, but not the device's activity, so all times are "
            "the host's; record both with activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]"
        )
    for share, place in (
        (steps.before_share, "before the first step, in work that the host had launched before"),
        (steps.after_share, "after the last step"),
    ):
        if share >= _NOTED_SHARE:
            notes.append(f"{share:.0%} of the device's busy time is {place}, and not counted")
    if steps.unlinked_share >= _NOTED_SHARE:
        notes.append(
            f"the launch of {steps.unlinked_share:.0%} of the kernels was not recorded, so their region is "
            "unknown, and they are counted as other computation; they may be those of the step before the "
            "recording"
        )
    if max(len(recording.host), len(recording.device)) > most_named:
        notes.append(
            f"the timeline shows only {most_named} operators and as many kernels by name: those of the "
            "middle step, and the longest ones of other steps"
        )
    return notes
