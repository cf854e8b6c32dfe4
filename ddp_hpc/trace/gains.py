"""Writes what would make a step shorter, and by how much at most."""

from __future__ import annotations

import math
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator
from operator import attrgetter

from ddp_hpc.base.units import duration
from ddp_hpc.trace.analysis_results import IDLE_CAUSES, Capture, Times
from ddp_hpc.trace.critical_path import LATE, WAIT
from ddp_hpc.trace.input_shapes import shapes
from ddp_hpc.trace.named_results import Kernel
from ddp_hpc.trace.region_times import RECOMPUTED
from ddp_hpc.trace.slow_steps import mean_lengths, slow_steps_of
from ddp_hpc.trace.sums_over_ranks import computing_kernels
from ddp_hpc.trace.table_columns import short
from ddp_hpc.trace.wait_findings import has_long_waits

_MUCH = 0.05
"""Fraction of a step that a gain must be to be named."""
_MOST_NAMED = 3
_FEW_STEPS = 3
"""The least steps for which a device that lags behind the host would wait no more for it."""
_FUSIBLE = ("elementwise", "copies", "softmax and reductions", "normalization", "quantization")
# Kernels of torch itself, other than those that are fused already (foreach), and not those of Triton.
_EAGER = re.compile(r"(?!.*multi_tensor_apply).*(at::native|\(anonymous namespace\)::)")
_FUSE = "elementwise kernels, copies and reductions (a bound: torch.compile or fused kernels join them)"
_ATTENTION = "attention in several kernels (a bound: scaled_dot_product_attention has one)"
_FLOAT32 = (
    "float32 products outside of Tensor or matrix cores (a bound: mixed precision uses these, and so does "
    "TF32 from NVIDIA's A100 on)"
)
_NO_WORKERS = "_SingleProcessDataLoaderIter"
_CHANNELS_LAST = "model.to(memory_format=torch.channels_last) and inputs of this format can avoid them"
# Those of MIOpen, cuDNN and cuBLAS.
_CONVERSION = re.compile(r"^batched_transpose_|nchw_?(to|2)_?nhwc|nhwc_?(to|2)_?nchw", re.IGNORECASE)


def gains(capture: Capture, wall_s: float) -> str:
    """Returns how much shorter a step can be at most without each of its waits, the longest first."""
    mean, straggler = capture.mean, capture.straggler
    delay_s, late_s = (straggler.share * wall_s, straggler.before_s) if straggler else (0.0, 0.0)
    waited_s, rank = (straggler.waited_s, f"rank {straggler.rank}") if straggler else (0.0, "")
    other = f" other than waiting for {rank}" * bool(straggler)
    idle_s = 0.0 if capture.on_device else mean.idle_s
    lacks_workers = any(_NO_WORKERS in op.name for trace in capture.ranks for op in trace.ops)
    loader = "num_workers of the DataLoader" if lacks_workers else "more workers, or a faster file format"
    num_kernels = sum(trace.launches.num_kernels for trace in capture.ranks if trace.launches)
    is_long = mean.idle_kernel_s * len(capture.ranks) > 2e-6 * num_kernels  # usual between kernels
    data_s = _without_data_waits_s(capture)
    and_after = ", with the idle time right after it" * (data_s > mean.data_s)
    waits = {
        f"the delay of {rank} (attainable, with its cause)": delay_s,
        f"different starts of the ranks, of which {rank} is the last ({_start(capture)})": late_s,
        f"waiting for data{and_after} (attainable: {loader})": data_s,
        "saving snapshots (attainable: write them in the background)": mean.snapshot_s,
        f"late launches by the host (a bound: {_earlier(capture)})": _late_launches_s(capture),
        "launch calls (a bound: launch less; in the first steps, they also load code)": mean.idle_launch_s,
        "waits of kernels that are launched (a bound)": mean.idle_kernel_s * is_long,
        "Python or other code outside of operators (a bound)": idle_s,
        f"exposed communication{other} ({_hideable(mean, mean.comm_exposed_s - waited_s)})": (
            mean.comm_exposed_s - waited_s
        ),
        "exposed memory copies (a bound: what fits behind computation can be hidden)": mean.memcpy_s,
    }
    delays = [trace.launches.delay_s for trace in capture.ranks if trace.launches]
    is_busy = _computing_s(mean) >= wall_s / 2
    # Shorter kernels make a step shorter if they wait for the device, and not for their launch.
    is_limit = is_busy or statistics.fmean(delays or [0.0]) >= _MUCH * wall_s
    if capture.on_device and is_limit:
        shorter = _sums(capture, _could_be_shorter, _alone_s) | {_ATTENTION: _unfused_attention_s(capture)}
        most_s = _gained_by_device_s(capture)
        waits |= {what: min(gain_s, most_s) for what, gain_s in shorter.items()}
    longest = sorted((item for item in waits.items() if item[1] >= _MUCH * wall_s), key=lambda item: -item[1])
    whole = capture.a_step
    shares = ", ".join(f"{wait_s / wall_s:.0%} without {wait}" for wait, wait_s in longest)
    text = f"What would help most: {whole} of {duration(wall_s)} would be shorter by at most {shares}."
    if not longest:
        wait = f"No avoidable wait{' of the device' * capture.on_device} exceeds {_MUCH:.0%} of {whole}"
        text = f"{wait}, so only less or faster computation would make it much shorter."
    if {_ATTENTION, _FUSE} <= {wait for wait, _ in longest}:
        text += " Some kernels of attention are elementwise or reductions, so these two gains overlap."
    kinds, names = (_sums(capture, attrgetter(field)) for field in ("kind", "name"))
    if not names or (longest and not (capture.on_device and is_busy)):
        return text
    total_s, name = sum(kinds.values()) or 1.0, next(iter(names))
    named = ", ".join(f"{kinds[kind] / total_s:.0%} {kind}" for kind in [*kinds][:_MOST_NAMED])
    longest_kernel = f"the longest of them, {short(name)}, takes {names[name] / total_s:.0%}"
    return f"{text} The time of the kernels that compute is {named}; {longest_kernel}."


def _without_data_waits_s(capture: Capture) -> float:
    """Returns the time per step of waiting for data, and of what makes the same steps slow afterwards, when
    the queue of kernels is empty.
    """
    slow = slow_steps_of(capture.ranks)
    if slow is None or next(iter(slow.more)) not in ("data_s", "idle_data_s"):
        return capture.mean.data_s
    idle = ("idle_s", *IDLE_CAUSES)
    of_data = sum(more_s for part, more_s in slow.more.items() if part == "data_s" or part in idle)
    gain_s = slow.gain * capture.mean.wall_s * min(1.0, of_data / (sum(slow.more.values()) or 1.0))
    return max(capture.mean.data_s, gain_s)


def _late_launches_s(capture: Capture) -> float:
    """Returns the time per step of waiting for late launches: that of a rank or, since other ranks wait for
    it in collectives, that on the critical path.
    """
    path, wall_s = capture.path, capture.mean.wall_s
    if path is None or len(capture.ranks) == 1:
        return capture.mean.idle_host_s
    on_path_s = sum(row.dur_s for row in path.rows if row.kind == WAIT and row.name.startswith(LATE))
    share = on_path_s / (mean_lengths(capture.ranks)[path.step] or 1.0)
    return max(capture.mean.idle_host_s, min(share, 1.0) * wall_s)


def _gained_by_device_s(capture: Capture) -> float:
    """Returns the most that a step gains from shorter kernels: the time in which the host waits for the
    device, if the device waits for the host in each step, too, so that the host limits the speed otherwise.
    """
    by_host = [
        (times.data_s + times.snapshot_s + times.idle_host_s + times.idle_launch_s) / (times.wall_s or 1.0)
        for trace in capture.ranks
        for times in map(attrgetter("times"), trace.steps)
    ]
    if capture.num_steps < _FEW_STEPS or min(by_host) < _MUCH:
        return math.inf
    return statistics.fmean(trace.blocked_s for trace in capture.ranks)


def _start(capture: Capture) -> str:
    """Returns where the cause of a late start is: in a single step, the profiler may be one itself."""
    if capture.num_steps > 1:
        return "attainable, with its cause before the step"
    return "its cause is before the recording, and may be the start of the profiler: record several steps"


def _computing_s(mean: Times) -> float:
    return mean.forward_s + mean.backward_s + mean.optimizer_s + mean.other_s


def _hideable(mean: Times, exposed_s: float) -> str:
    """Returns how much of the exposed communication fits behind the computation that hides none yet."""
    free_s = max(0.0, _computing_s(mean) + mean.memcpy_s - mean.comm_hidden_s)
    if free_s >= exposed_s:
        return "a bound: what fits behind computation can be hidden"
    return (
        f"a bound: at most {free_s / (mean.wall_s or 1.0):.0%} fits behind computation, and the rest needs "
        "ranks that start it at the same time, or faster communication"
    )


def _earlier(capture: Capture) -> str:
    """Returns what makes the host launch earlier, which depends on how long it does something else."""
    if has_long_waits(capture):
        return "what the host does before them could take less time, or run in the background"
    return "fewer launches gain a part of it"


def _unfused_attention_s(capture: Capture) -> float:
    """Returns the time per step of the kernels that multiply queries and keys, process the scores, such as
    with softmax, and multiply them with the values, as far as the shapes of their inputs were recorded.
    """
    kernels = [(kernel, shapes(kernel.shapes)) for kernel in computing_kernels(capture) if kernel.shapes]
    scores = {
        of[0]
        for kernel, of in kernels
        if "softmax" in kernel.operator and len(of[0]) > 2 and min(of[0][-2:]) > 1
    }
    flat = {(math.prod(score[:-2]), *score[-2:]) for score in scores}
    flat |= {(batch, keys, queries) for batch, queries, keys in flat}  # transposed in the backward pass
    products_s = others_s = 0.0
    for kernel, of in kernels:
        if kernel.operator in ("aten::bmm", "aten::baddbmm") and len(of) > 1 and len(of[-1]) == 3:
            left, right = of[-2:]
            products_s += _alone_s(kernel) * (not flat.isdisjoint({left, right, (*left[:2], right[2])}))
        else:
            others_s += _alone_s(kernel) * (not scores.isdisjoint(of))
    num = len(capture.ranks) * capture.num_steps
    return (products_s + others_s) / num if products_s else 0.0


def _could_be_shorter(kernel: Kernel) -> str:
    """Returns what makes a kernel shorter, as one of the gains; empty for most kernels."""
    if kernel.kind in _FUSIBLE and _EAGER.match(kernel.name):
        return _FUSE
    return _FLOAT32 if kernel.kind in ("matrix products", "convolution") and kernel.tensor_cores == 0 else ""


def _alone_s(kernel: Kernel) -> float:
    """Returns the time in which no collective runs: one that does may be what the step waits for."""
    return kernel.total_s - kernel.running_s


def _sums(
    capture: Capture,
    group: Callable[[Kernel], str],
    time_s: Callable[[Kernel], float] = attrgetter("total_s"),
) -> dict[str, float]:
    """Returns the time per step of the kernels that compute by their group, the longest first."""
    sums: defaultdict[str, float] = defaultdict(float)
    for kernel in computing_kernels(capture):
        sums[group(kernel)] += time_s(kernel) / (len(capture.ranks) * capture.num_steps)
    sums.pop("", None)
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def avoidable(capture: Capture) -> Iterator[str]:
    """Names changes of the memory format of images, and recomputation, if they take a large part of the time
    of computing kernels.
    """
    kernels, num = computing_kernels(capture), len(capture.ranks) * capture.num_steps
    all_s = sum(kernel.total_s for kernel in kernels) or 1.0
    changing_s = sum(kernel.total_s for kernel in kernels if _CONVERSION.search(kernel.name))
    again_s = sum(
        region.device_s for trace in capture.ranks for region in trace.regions if region.name == RECOMPUTED
    )
    for time_s, what, remedy in (
        (changing_s, "Changes between the memory formats NCHW and NHWC take", _CHANNELS_LAST),
        (again_s, "Recomputation takes", "it saves memory: checkpoint fewer layers if there is enough"),
    ):
        if time_s >= _MUCH * all_s:
            share, each_s = f"{time_s / all_s:.0%} of the time of computing kernels", time_s / num
            of_step = f"at most {each_s / (capture.mean.wall_s or 1.0):.0%} of {capture.a_step}"
            yield f"{what} {share} ({duration(each_s)}, {of_step}); {remedy}."
