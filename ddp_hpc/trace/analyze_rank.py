"""Reads and analyzes the trace of one rank."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ddp_hpc.trace.analysis_results import Collective, Op, RankTrace, Span, Step
from ddp_hpc.trace.curves import memories
from ddp_hpc.trace.device_summary import summarize
from ddp_hpc.trace.event_columns import MOST_EVENTS, Columns, nanoseconds
from ddp_hpc.trace.event_names import ALL_STEPS, STEP, UPDATE, annotated_kind
from ddp_hpc.trace.events_by_kind import Call, RankEvents, add_events
from ddp_hpc.trace.host_waits import host_waits
from ddp_hpc.trace.intervals import Longs
from ddp_hpc.trace.named_events import CallTree, call_tree, kernels, named_events
from ddp_hpc.trace.parse_events import Reading, read_events
from ddp_hpc.trace.step_times import Steps, measure

_MOST_SPANS = 50_000
_NOTED_SHARE = 0.01
_MOST_OPS = 1000
_MOST_RANKS = 1_000_000
_FAR_NS = 2**63
_IN_NAME = re.compile(r"rank[-_]?(\d+)(?:[-_]of[-_](\d+))?|(\d+)[-_]of[-_](\d+)", re.IGNORECASE)


def read_rank(path: Path, most_named: int = 30_000) -> RankTrace:
    """Reads the trace of one rank. The rank is -1 if neither the trace nor the file name contains it.

    `most_named` limits the kernels, and also the operators, that the timeline shows by name.

    Raises:
        OSError: the file cannot be opened.
    """
    reading, rank_events = _read_events(path)
    rank, world_size = _place(path, reading.head)
    firsts = [columns.first_us() for columns in (rank_events.host, rank_events.device)]
    base_us = min((first for first in firsts if first is not None), default=0.0)
    steps = measure(rank_events, base_us)
    clock_ns = _zero_ns(reading.head)
    zero_s = clock_ns * 1e-9 + base_us * 1e-6
    collectives = _collectives(rank_events.calls, base_us, zero_s, steps)
    spans = _spans(steps, zero_s)
    tree = call_tree(rank_events, base_us, steps)
    named = named_events(rank_events, base_us, zero_s, steps, tree, most_named)
    waits, gaps = host_waits(rank_events, base_us, steps, tree)
    notes = reading.notes + (_notes(rank_events, steps, len(spans), most_named) if reading.num_events else [])
    host = reading.head.get("host_name")
    host = host if isinstance(host, str) else ""
    chosen = steps.contain(rank_events.device.start_ns(base_us))
    device = summarize(rank_events, steps, base_us, zero_s, len(collectives))
    return RankTrace(
        rank=rank,
        world_size=world_size,
        path=str(path),
        host=host,
        device=_device(rank_events, reading.head),
        steps=tuple(
            Step(number, zero_s + int(start) * 1e-9, times)
            for number, start, times in zip(steps.numbers, steps.starts, steps.times, strict=True)
        ),
        spans=spans[:_MOST_SPANS],
        collectives=collectives,
        ops=_ops(
            rank_events.host,
            tree,
            rank_events.device.dur_ns() * chosen,
            steps.contain(rank_events.host.start_ns(base_us), on_host=True),
        ),
        kernels=kernels(rank_events, tree, chosen, _MOST_OPS),
        loading_s=steps.loading_s if steps.numbers else 0.0,
        memory=memories(rank_events, base_us, zero_s, steps, tree),
        num_events=reading.num_events,
        notes=tuple(notes),
        process=_process(rank_events, host),
        device_name=_device_name(reading.head) if len(rank_events.device) else "",
        is_cut_off=reading.is_cut_off,
        **device,
        host_waits=waits,
        gaps=gaps,
        clock_ns=clock_ns,
        named=named,
        steps_from=steps.separator,
        is_ring=_is_ring(reading.head.get("distributedInfo")),
    )


def _read_events(path: Path) -> tuple[Reading, RankEvents]:
    reading, rank_events, world_size = Reading(), RankEvents(), 0
    for events in read_events(path, reading):
        world_size = world_size or _place(path, reading.head)[1]
        add_events(events, rank_events, world_size)
    return reading, rank_events


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


def _device(rank_events: RankEvents, head: dict[str, Any]) -> str:
    runtimes = {category.partition("_")[0] for category, _ in rank_events.launches.names} - {"cuda"}
    if runtimes:  # xpu_runtime, mtia_runtime; that of ROCm is named cuda_runtime
        return min(runtimes)
    if not len(rank_events.device):
        return "cpu"
    kinds = {name.partition(":")[0] for _, name in rank_events.memory.names} - {"cpu"}
    return next(iter(sorted(kinds)), "xpu" if "xpu" in str(head.get("deviceProperties")).lower() else "cuda")


def _process(rank_events: RankEvents, host: str) -> str:
    """Returns host and process ID of the recorded program, or an empty string if its events lack them."""
    pid = next((pid for pid, _ in rank_events.host.threads), None)
    return f"{host}/{pid}" if isinstance(pid, int) and len(rank_events.host) else ""


def _device_name(head: dict[str, Any]) -> str:
    """Returns the product names of the host's devices, or an empty string if they were not recorded."""
    properties = head.get("deviceProperties")
    devices = properties if isinstance(properties, list) else []
    names = {device.get("name") for device in devices if isinstance(device, dict)}
    return ", ".join(sorted(name for name in names if isinstance(name, str)))


def _collectives(calls: list[Call], base_us: float, zero_s: float, steps: Steps) -> tuple[Collective, ...]:
    on_device = any(call.on_device for call in calls)
    # NCCL implements all-to-all with the kernels of send and receive.
    on_host = {call.kind for call in calls if not call.on_device}
    is_all_to_all = "all_to_all" in on_host and not on_host & {"send", "recv", "send_recv"}
    collectives = []
    for call in sorted(calls, key=lambda call: call.start_us):
        if call.on_device == on_device and not call.is_launch:
            start_ns = int(nanoseconds(call.start_us - base_us))
            start_s = zero_s + start_ns * 1e-9
            step = steps.step_of(start_ns)
            dur_s = int(nanoseconds(call.dur_us)) * 1e-9
            kind = "all_to_all" if call.kind == "send_recv" and is_all_to_all else call.kind
            about = kind, call.group, call.num_ranks, call.bytes
            collectives.append(Collective(*about, start_s, dur_s, step, call.kernel))
    return tuple(collectives)


def _spans(steps: Steps, zero_s: float) -> tuple[Span, ...]:
    spans = [
        Span(region, zero_s + int(start) * 1e-9, int(end - start) * 1e-9, steps.step_of(int(start)))
        for region, (starts, ends) in steps.regions.items()
        for start, end in zip(starts, ends, strict=True)
    ]
    return tuple(sorted(spans, key=lambda span: span.start_s))


def _ops(
    columns: Columns, tree: CallTree, device_durations: Longs, chosen: npt.NDArray[np.bool_]
) -> tuple[Op, ...]:
    """Returns the chosen operators by self time, computed as in torch's key averages; tests/trace compares
    the two.
    """
    # All steps (`ProfilerStep#3`) are one entry. Collectives are omitted, since they have a separate table.
    names = [ALL_STEPS if name.startswith(STEP) else name for _, name in columns.names]
    numbers: dict[str, int] = {}
    key = np.array([numbers.setdefault(name, len(numbers)) for name in names], np.intc)[columns.name]
    durations = columns.dur_ns()
    above = tree.above
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
    device_totals = np.bincount(key[counted], tree.device_ns(device_durations)[counted] * 1e-9, size)
    ops = [
        Op(name, int(calls[i]), *(float(of[i]) for of in (totals, selves, device_totals)))
        for name, i in numbers.items()
        if calls[i] and not annotated_kind(name)
    ]
    return tuple(sorted(ops, key=lambda op: -op.self_s)[:_MOST_OPS])


def _notes(rank_events: RankEvents, steps: Steps, num_spans: int, most_named: int) -> list[str]:
    notes = []
    dropped = sum(part.num_dropped for part in vars(rank_events).values() if isinstance(part, Columns))
    if dropped or rank_events.num_calls_dropped:
        notes.append(
            f"{dropped + rank_events.num_calls_dropped} events after the first {MOST_EVENTS} of their kind "
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
        from_launch = ", from the first launch to the end of the last kernel," if steps.device else ""
        notes.append(
            f"profiler.step() was not called, so the whole recording{from_launch} is treated as one step"
        )
    if rank_events.lacks_device:
        notes.append(
            "calls to the device's runtime were recorded, but not the device's activity, so all times are "
            "the host's; record both with activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]"
        )
    if steps.outside_share >= _NOTED_SHARE:
        notes.append(
            f"{steps.outside_share:.0%} of the device's busy time is outside the steps and not counted"
        )
    if steps.unlinked_share >= _NOTED_SHARE:
        notes.append(
            f"the launch of {steps.unlinked_share:.0%} of the kernels was not recorded, so their region is "
            "unknown, and they are counted as other computation; they may be those of the step before the "
            "recording"
        )
    if num_spans > _MOST_SPANS:
        notes.append(f"the timeline shows only the first {_MOST_SPANS} of {num_spans} spans")
    if max(len(rank_events.host), len(rank_events.device)) > most_named:
        notes.append(
            f"the timeline shows only {most_named} operators and as many kernels by name: those of the "
            "middle step, and the longest ones of other steps"
        )
    return notes
