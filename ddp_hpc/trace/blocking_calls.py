"""Finds the calls of the device's runtime in which the host waits for the device or the driver."""

from __future__ import annotations

import re

import numpy as np

from ddp_hpc.trace.analysis_results import AFTER, HostTime
from ddp_hpc.trace.event_names import STEP
from ddp_hpc.trace.events_by_kind import Recording
from ddp_hpc.trace.named_events import CallTree
from ddp_hpc.trace.step_times import Steps

_BLOCKING = re.compile(r"(?!\w*(Async|Graph))\w*(Synchronize|Free|[Aa]lloc|Memcpy)")
_MOST = 100


def blocking_calls(recording: Recording, steps: Steps, tree: CallTree) -> tuple[HostTime, ...]:
    """Returns the calls by name and what is around them, those with the longest time first.

    These are calls that synchronize, allocate or free memory, and copies whose call ends after the copy.
    """
    host, calls = recording.host, recording.launches
    chosen = calls.where(lambda _, name: _BLOCKING.match(name))
    if steps.device:
        call = steps.device.launches.call
        is_copy = (call >= 0) & recording.device.where(lambda category, _: category == "gpu_memcpy")
        chosen[call[is_copy][calls.ends[call[is_copy]] >= recording.device.ends[is_copy]]] = True
    is_after = np.zeros(len(calls), bool)
    if steps.separator:  # until the device has finished the last step
        is_after = (calls.starts >= steps.on_host[1].max()) & (calls.starts < steps.ends.max())
    at = np.flatnonzero(chosen & ~tree.is_nested & (is_after | steps.contain_on_host(calls.starts)))
    operator = annotation = tree.caller[at]
    is_operator = host.where(lambda category, _: category == "cpu_op")
    while (is_inner := (annotation >= 0) & is_operator[annotation]).any():
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
