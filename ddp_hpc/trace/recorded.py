"""Describes what was recorded: the ranks, the device and its use, the input, the memory."""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence

from ddp_hpc.base.device_peaks import peaks_of
from ddp_hpc.base.text_table import cut
from ddp_hpc.base.units import duration, format_bytes
from ddp_hpc.trace.analysis_results import Capture
from ddp_hpc.trace.event_names import STEP
from ddp_hpc.trace.input_shapes import num_flops
from ddp_hpc.trace.kernel_kinds import KINDS, PRODUCTS, data_type
from ddp_hpc.trace.kernel_tables import place
from ddp_hpc.trace.named_results import Kernel
from ddp_hpc.trace.sums_over_ranks import computes, computing_kernels, weighted
from ddp_hpc.trace.table_columns import short
from ddp_hpc.trace.tables import device_memory
from ddp_hpc.trace.trace_files import first_of

_HOST_LENGTH, _MOST_TYPES, _LEAST_SHARE, _MUCH, _MOST_CHARACTERS = 64, 3, 0.001, 0.05, 300

_NEARLY_ALL = 0.95
_CALLS = ("nccl:", "record_param_comms", "c10d::")


def about(capture: Capture) -> list[tuple[str, str]]:
    """Returns what was measured, and where: terms and descriptions."""
    steps = sorted({step.number for trace in capture.ranks for step in trace.steps})
    numbers = f"{steps[0]} to {steps[-1]}" if len(steps) > 1 else f"number {steps[0]}"
    has_size = any(trace.world_size for trace in capture.ranks)
    of_size = f"of {capture.world_size}" if has_size else "(world size not recorded)"
    names = sorted({trace.device_name or trace.device for trace in capture.ranks})
    hosts = list(dict.fromkeys(cut(trace.host, _HOST_LENGTH) or "unknown" for trace in capture.ranks))
    found = [
        ("ranks", f"{len(capture.ranks)} {of_size}"),
        ("hosts", first_of(hosts) if hosts != ["unknown"] else ""),
        ("device", first_of(names) + ("" if capture.on_device else "; no activity of another device")),
        ("steps", f"{len(steps)} ({numbers})" if capture.has_steps else ""),
        ("mean step" if capture.has_steps else "recording", duration(capture.mean.wall_s)),
    ]
    return [(term, text) for term, text in found if text]


def details(capture: Capture) -> list[tuple[str, str]]:
    """Returns what was recorded: terms and descriptions."""
    found, on_host, first = [], "", capture.ranks[0]
    if capture.on_device:
        on_host = " on the host"
        found += [("Tensor or matrix cores", _use_of_cores(capture)), ("launches", _launches(capture))]
        in_steps = " in the steps" * capture.has_steps
        found.append((f"longest call of a computing kernel{in_steps}", _longest_call(capture)))
    of_rank = f" on rank {first.rank}" * (len(capture.ranks) > 1)
    found.append((f"input of the first layer{of_rank}", first.first_input))
    if first.num_samples and capture.has_steps:
        speed = first.num_samples / (capture.mean.wall_s or 1.0)
        text = f"{speed:,.0f}" if speed >= 10 else f"{speed:.2g}"
        text += " samples per second on a rank, if the first dimension of this input is the batch"
        found.append(("speed", text))
    found += _data_types(capture)
    if not capture.collectives:
        is_called = any(op.name.startswith(_CALLS) for trace in capture.ranks for op in trace.ops)
        what = "collectives were called, but their kernels were not recorded"
        found.append(("communication", what if is_called else "no collective was recorded"))
    memories = [memory for trace in capture.ranks for memory in device_memory(trace)]
    largest = max(memories, key=lambda memory: memory.allocated_bytes, default=None)
    peak = "not recorded (profile_memory=True)"
    if largest and largest.allocated_bytes > 0:
        more = " more than at the start of the recording" * largest.is_change
        capacity = first.memory_bytes * (largest.device != "cpu")
        whole = f" of {format_bytes(capacity)}" * (capacity > 0)
        peak = f"at most {format_bytes(largest.allocated_bytes)}{more}{whole * (not more)}"
    elif any(trace.memory for trace in capture.ranks):
        peak = "only that of the host was recorded; check whether torch's caching allocator is disabled"
    found.append(("memory of the device" if capture.on_device else "memory", peak))
    loading_s = sum(trace.host_s.get("data", 0.0) for trace in capture.ranks) / len(capture.ranks)
    loading = f"{duration(loading_s)}{capture.per_step}"
    if all(event.kind != "data" for trace in capture.ranks for event in trace.named):
        loading = "not recorded (no DataLoader, and no region named data)"
    found.append((f"data loading{on_host}", loading))
    found += [(term, cut(text, _MOST_CHARACTERS)) for term, text in first.metadata]
    return [(term, text) for term, text in found if text]


def _longest_call(capture: Capture) -> str:
    """Describes the longest call of a kernel that computes."""
    computing = ((one, trace) for trace in capture.ranks for one in trace.kernels if computes(one))
    kernel, trace = max(computing, key=lambda one: one[0].longest_s, default=(None, capture.ranks[0]))
    if kernel is None:
        return ""
    operator = "" if kernel.operator.startswith(STEP) else kernel.operator
    launcher = f"launched by {operator}" * bool(operator)
    if operator and kernel.shapes:
        launcher += f" with inputs of {kernel.shapes}"
    at = place(capture, trace.rank, kernel.longest_step, kernel.longest_after_s)
    parts = [short(kernel.name), duration(kernel.longest_s), at and f"at {at}", launcher]
    return ", ".join(filter(None, parts))


def _use_of_cores(capture: Capture) -> str:
    """Returns the use of Tensor Cores and the occupancy, by the time of kernels other than collectives."""
    rows = [vars(kernel) for trace in capture.ranks for kernel in trace.kernels if kernel.kind in KINDS]
    times: defaultdict[float | None, float] = defaultdict(float)
    for row in rows:
        times[row["tensor_cores"]] += row["total_s"] * (not row["is_copy"])
    all_s = sum(times.values()) or 1.0
    known = f"used {times[1.0] / all_s:.0%} of the time of computing kernels, by their names"
    if times[None] >= _MUCH * all_s:
        known += f"; unknown for {times[None] / all_s:.0%}"
    occupancy = weighted(rows, "occupancy")
    estimate = "not recorded for most kernels" if occupancy is None else f"{occupancy:.0f}% (estimated)"
    return f"{known if times[1.0] or times[0.0] else 'unknown'}; occupancy of computing kernels: {estimate}"


def _launches(capture: Capture) -> str:
    """Describes how the host launches kernels, and how long these are: means of the ranks."""
    stats = [vars(trace.launches) for trace in capture.ranks if trace.launches]
    if not stats:
        return ""
    of = {name: statistics.fmean(one[name] for one in stats) for name in stats[0] if name != "outside_graphs"}
    return (
        f"{of['num_calls']:,.0f} calls launch {of['num_kernels']:,.0f} kernels and copies{capture.per_step}, "
        f"{of['num_late']:,.0f} of them late; {of['num_short']:,.0f} kernels are shorter than their call; "
        f"medians: {duration(of['call_s'])} for a call, {duration(of['kernel_s'])} for a kernel, which "
        f"starts {duration(of['delay_s'])} after its call, and a queue "
        f"of {of['queue_median']:,.0f}, which is empty for {of['queue_empty']:.0%} of the time"
    )


def _data_types(capture: Capture) -> Iterator[tuple[str, str]]:
    """Yields the shares of the data types, for each kind of kernels with matrix products, and the share of
    these kernels in the time of all that compute.

    They are those of inputs, unless these were not recorded or the name of the kernel has a type of fewer
    bits: torch.ops of other libraries convert their inputs themselves.
    """
    times: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    for kernel in computing_kernels(capture):
        inputs, named = re.search(r"\((\w+)", kernel.shapes), data_type(kernel.name)
        times[kernel.kind][inputs[1] if inputs and not named.startswith("FP") else named] += kernel.total_s
    all_s = sum(sum(times[kind].values()) for kind in KINDS)
    for kind in PRODUCTS:
        kind_s = sum(times[kind].values()) or 1.0
        shares = {dtype: dtype_s / kind_s for dtype, dtype_s in times[kind].items()}
        longest = sorted(shares, key=lambda dtype: -shares[dtype])[:_MOST_TYPES]
        shown = ", ".join(f"{shares[dtype]:.1%} {dtype}" for dtype in longest if shares[dtype] > _LEAST_SHARE)
        if shown and kind_s < (1 - _LEAST_SHARE) * all_s:
            shown += f"; these kernels take {kind_s / all_s:.1%} of the time of computing kernels"
        yield f"data types of {kind}", shown
    yield "speed of matrix products", _speed_of_products(capture)


def _speed_of_products(capture: Capture) -> str:
    """Returns the operations per second of the matrix products whose shapes are known, if most are, and if
    these kernels take much of the time of all that compute.
    """
    kernels = computing_kernels(capture)
    products = [kernel for kernel in kernels if kernel.kind == "matrix products"]
    each = [num_flops(kernel.operator, kernel.shapes, kernel.name) for kernel in products]
    known_s = sum(kernel.total_s for kernel in products if num_flops(kernel.operator, kernel.shapes))
    flops = sum(kernel.num_calls * flops for kernel, flops in zip(products, each, strict=True))
    all_s = sum(kernel.total_s for kernel in products)
    if not flops or known_s < all_s / 2 or all_s < _MUCH * sum(kernel.total_s for kernel in kernels):
        return ""
    speed = flops / known_s / 1e12
    share = f"from the shapes of {known_s / all_s:.0%} of them by time"
    return f"{speed:.3g} TFLOP/s{_of_peak(speed, products, capture)}, {share}"


def _of_peak(tflops: float, products: Sequence[Kernel], capture: Capture) -> str:
    """Returns the share of the device's peak, if it is known and nearly all products have one data type."""
    peaks = peaks_of(capture.ranks[0].device_name)
    times: defaultdict[str, float] = defaultdict(float)
    for kernel in products:
        dtype = re.search(r"\((\w+)\)", kernel.shapes)
        name = dtype[1] if dtype else ""
        name = "TF32" if name == "float" and kernel.tensor_cores else name
        times[name] += kernel.total_s
    name = max(times, key=lambda one: times[one])
    if peaks is None or times[name] < _NEARLY_ALL * sum(times.values()):
        return ""
    of = {"BFloat16": peaks.half, "Half": peaks.half, "TF32": peaks.tf32, "float": peaks.float32}
    return f" ({tflops / of[name]:.0%} of the device's peak in {name})" if name in of else ""
