"""Finds the calls of the device's runtime in which the host waits for the device or the driver."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator

import numpy as np

from ddp_hpc.base.units import duration
from ddp_hpc.trace import tables
from ddp_hpc.trace.analysis_results import AFTER, Capture, HostTime
from ddp_hpc.trace.event_names import STEP, can_block
from ddp_hpc.trace.events_by_kind import Recording
from ddp_hpc.trace.named_events import CallTree
from ddp_hpc.trace.step_times import Steps

_MOST = 100
_MUCH = 0.05
"""Fraction of a step that these calls must take to be described."""
_MANY_CALLS = 10
"""Calls per step from which on they are not those of a few large tensors."""
_CALLS = (
    (
        r"\w*(Free|[Aa]lloc)",
        _MANY_CALLS,
        "With so many of these calls in a step, the caching allocator is probably disabled: check whether "
        "PYTORCH_NO_CUDA_MEMORY_CACHING or PYTORCH_NO_HIP_MEMORY_CACHING is set.",
    ),
    (
        r"\w*(Free|[Aa]lloc)",
        0,
        "This call can wait until the device has finished everything: check whether the caching allocator is "
        "disabled, the memory nearly full, or a library allocates its own workspace.",
    ),
    (
        r"\w*(Synchronize|Memcpy)",
        0,
        "The host waits for results of the device there: .item(), .cpu() and printing a tensor do so. If it "
        "does not need them at once, this time can be avoided, and the step is shorter where the device is "
        "idle after the call.",
    ),
)
"""Calls in which a host can wait for the device, their least number per step, and what to do."""


def blocking_calls(recording: Recording, steps: Steps, tree: CallTree) -> tuple[HostTime, ...]:
    """Returns the calls by name and what is around them, those with the longest time first.

    These are calls that synchronize, allocate or free memory, and copies whose call ends after the copy.
    """
    host, calls = recording.host, recording.launches
    chosen = calls.where(lambda _, name: can_block(name))
    if steps.device:
        call = steps.device.launches.call
        is_copy = (call >= 0) & recording.device.where(lambda category, _: category == "gpu_memcpy")
        chosen[call[is_copy][calls.ends[call[is_copy]] >= recording.device.ends[is_copy]]] = True
    is_after = np.zeros(len(calls), bool)
    if steps.separator:  # until the device has finished the last step
        is_after = (calls.starts >= steps.on_host[1].max()) & (calls.starts < steps.ends.max())
    at = np.flatnonzero(chosen & ~tree.is_nested & (is_after | steps.contain_on_host(calls.starts)))
    operator = annotation = tree.caller[at]
    is_operator = np.append(host.where(lambda category, _: category == "cpu_op"), False)
    while (is_inner := is_operator[annotation]).any():
        annotation = np.where(is_inner, tree.above[annotation], annotation)
    names = np.append(host.name, np.intc(len(host.names)))
    texts = ["" if name.startswith(STEP) else name for _, name in host.names] + ["", AFTER]
    around = np.where(is_after[at], np.intc(len(texts) - 1), names[annotation])
    groups, index = np.unique(
        np.stack([calls.name[at], names[operator], around]), axis=1, return_inverse=True
    )
    index = index.ravel()
    times = np.bincount(index, calls.durations[at] * 1e-9).tolist()
    counts = np.bincount(index).tolist()
    found = [
        HostTime(calls.names[name][1], texts[one], num, total_s, texts[other] if other != one else "")
        for (name, one, other), num, total_s in zip(groups.T.tolist(), counts, times, strict=True)
    ]
    return tuple(sorted(found, key=lambda call: -call.total_s)[:_MOST])


def describe(capture: Capture) -> Iterator[str]:
    """Names the calls in which the host waits, if they take a large part of a step."""
    wall_s = capture.mean.wall_s or 1.0
    blocked_s = statistics.fmean(trace.blocked_s for trace in capture.ranks)
    rows = [row for row in tables.blocking_calls(capture).rows if row["annotation"] != AFTER]
    if capture.on_device and blocked_s >= _MUCH * wall_s:
        first = rows[0]
        where = f" in {first['annotation']}" if first["annotation"] else ""
        times = f" ({first['num_calls']:,.3g} times)" if first["num_calls"] > 1 else ""
        num_calls = sum(row["num_calls"] for row in rows if row["name"] == first["name"])
        advice = (
            text for words, least, text in _CALLS if re.match(words, first["name"]) and num_calls >= least
        )
        yield (
            f"The host is in blocking calls for {duration(blocked_s)} ({blocked_s / wall_s:.0%}) of "
            f"{capture.a_step}, of which {duration(first['total_s'])} is {first['call']}{where}{times}. "
            f"{next(advice, '')}".rstrip()
        )
