"""Writes the findings on what the host and the device wait for."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Sequence

from ddp_hpc.base.text_table import Row
from ddp_hpc.base.units import counted, duration
from ddp_hpc.trace import tables
from ddp_hpc.trace.analysis_results import AFTER, BEFORE, NO_CALL, Capture
from ddp_hpc.trace.event_names import region_of
from ddp_hpc.trace.named_results import LaunchStats
from ddp_hpc.trace.table_columns import short
from ddp_hpc.trace.trace_files import first_of

_MUCH = 0.05
"""Fraction of a step that waits of the host must take to be described."""
_MUCH_IDLE = 0.1
"""Fraction of a step that the device must be idle for its causes to be reported."""
_LONG_WAIT_S = 1e-3
"""Mean wait for a late launch above which the host must have done something other than launching kernels."""
_MUCH_OF_WAITS = 0.1
"""Fraction of the waits for the host that a call must take to be named."""
_MOST_OF_WAITS = 0.9
"""Fraction of the waits for the host above which one of them is named instead of their mean."""
_FULL_QUEUE = 1000
"""About as many kernels fit into the queue of NVIDIA's devices, before launches wait."""
_LITTLE = 0.01
"""Fraction of a step below which a part is not mentioned."""
_MOST_AT_START, _MUCH_AT_START = 4, 0.05
"""The most parts of the time before the first step that are named, and the least fraction of it."""
_SOME, _MANY_KERNELS, _EACH_S, _MOST_NAMED = 0.02, 30, 1e-4, 2
"""The least fraction of a step and the least kernels of an optimizer for advice, the longest wait for each of
these for which launching is the cause, and the most calls to name."""
_HAS_FUSED = re.compile(r"#(Adam|AdamW|SGD|Adagrad)\.")  # for CUDA in torch 2.13
_ALLOCATES, _ANY = r"\w*(Free|[Aa]lloc)", r"\w*(Synchronize|Memcpy)"
_CALLS = (
    (
        _ALLOCATES,
        "",
        "This call can wait until the device has finished everything: check whether the caching allocator is "
        "disabled (PYTORCH_NO_CUDA_MEMORY_CACHING, PYTORCH_NO_HIP_MEMORY_CACHING), the memory nearly full, "
        "or a library allocates its own workspace.",
    ),
    (
        _ANY,
        "DtoH|DeviceToHost",
        "It copies a result of the device to the host, as .item(), .cpu() and printing a tensor do: do so "
        "less often, or later.",
    ),
    (
        _ANY,
        "HtoD|HostToDevice",
        "It copies a tensor from the host to the device after all earlier work of the stream: copy it from "
        "pinned memory (pin_memory=True of the DataLoader) with non_blocking=True, or create it on the "
        "device if it is small, such as an index.",
    ),
    (_ANY, "", "If the program does not need to wait there, the host can launch more work in this time."),
)
"""Calls in which a host can wait for the device, their copy, and what to do."""


def waits_of_host(capture: Capture) -> Iterator[str]:
    """Names the calls in which the host waits, and where it waits without a call, if this takes long."""
    wall_s = capture.mean.wall_s or 1.0
    everything = tables.blocking_calls(capture).rows
    early = [row for row in everything if row["annotation"] == BEFORE]
    rows = _in_steps(everything)
    still = [row for row in rows if row["reason"] == NO_CALL]
    rows = [row for row in rows if row["reason"] != NO_CALL]
    early_s = sum(row["total_s"] for row in early) / capture.num_steps
    blocked_s = statistics.fmean(trace.blocked_s for trace in capture.ranks) - early_s
    if early_s >= _MUCH * wall_s:
        yield (
            f"Before the first step of the device, the host is in {early[0]['call']} for "
            f"{duration(early[0]['total_s'])}: the device still runs earlier work, so this is not in a step."
        )
    if rows and capture.on_device and blocked_s >= _MUCH * wall_s:
        first = rows[0]
        advice = (
            text
            for words, copy, text in _CALLS
            if re.match(words, first["name"]) and re.search(copy, first["reason"])
        )
        reasons = [f"the copy {first['reason']}"] if first["reason"] else []
        if first["comm_s"] >= first["total_s"] / 2:
            late = f" that wait for rank {capture.straggler.rank}" if capture.straggler else ""
            reasons.append(f"collectives{late} ({duration(first['comm_s'])})")
        copy = f", which waits for {' and '.join(reasons)}" if reasons else ""
        yield (
            f"The host is in blocking calls for {_share(blocked_s, capture)}, of which "
            f"{duration(first['total_s'])} is {_place(first)}{copy}. "
            + _cost(rows, capture, next(advice, ""))
        )
    still_s = sum(row["total_s"] for row in still)
    if still_s >= _MUCH * wall_s:
        part = f", for {duration(still[0]['total_s'])} of it," if len(still) > 1 else ""
        yield (
            f"The host stands still for {_share(still_s, capture)}: it waits or computes without a recorded "
            f"call{part} in {_place(still[0])}. {_cost(still, capture)}"
        )


def _in_steps(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["annotation"] not in (AFTER, BEFORE) and not row.get("is_sum")]


def _share(time_s: float, capture: Capture) -> str:
    return f"{duration(time_s)} ({time_s / (capture.mean.wall_s or 1.0):.0%}) of {capture.a_step}"


def _place(row: Row) -> str:
    around = f" in {row['annotation']}" if row["annotation"] else ""
    num = f"{row['num_calls']:,.1f}".removesuffix(".0")
    return f"{row['call']}{around}" + (f" ({num} times)" if row["num_calls"] > 1 else "")


def _cost(rows: Sequence[Row], capture: Capture, advice: str = "") -> str:
    idle_s = sum(row["idle_s"] for row in rows)
    little_s = _LITTLE * capture.mean.wall_s
    is_for_copy = rows[0]["reason"] not in ("", NO_CALL)
    if idle_s >= little_s:
        lost = f"The device has nothing to do for at most {duration(idle_s)} because of this."
    elif is_for_copy and (copying_s := capture.mean.memcpy_s) >= little_s:
        only_s = f"for {duration(copying_s)}{capture.per_step}, only copies"
        lost = f"The device has work meanwhile, but {only_s}, without computation."
    else:
        work = "runs these collectives" if rows[0]["comm_s"] >= rows[0]["total_s"] / 2 else "has work"
        return f"The device {work} meanwhile, so this hardly makes {capture.a_step} longer."
    return f"{advice} {lost}".lstrip()


def cut_starts(capture: Capture, wall_s: float) -> Iterator[str]:
    """Says on which ranks the device was busy with earlier work at the start of the recording, if the host
    fetched data in the meantime.
    """
    named = [
        f"rank {trace.rank} ({duration(late_s)})"
        for trace, mean in zip(capture.ranks, capture.rank_means, strict=True)
        if trace.busy and (late_s := trace.cut_off_s) > 0
        if min(late_s / len(trace.steps), trace.host_s.get("data", 0.0) - mean.data_s) >= _LITTLE * wall_s
    ]
    if named:
        first = "first " * (capture.num_steps > 1)
        yield (
            f"The {first}step is cut off at its start on {first_of(named)}: the device still ran "
            "earlier work, so this time and data loading in it are not in the step."
        )


def before_steps(capture: Capture, wall_s: float) -> Iterator[str]:
    """Describes what the host does before the first step, if it takes longer than a step."""
    trace = max(capture.ranks, key=lambda trace: sum(one.total_s for one in trace.startup))
    whole_s = sum(one.total_s for one in trace.startup)
    if whole_s > wall_s:
        of_rank = f" of rank {trace.rank}" * (len(capture.ranks) > 1)
        longest = [
            f"{duration(one.total_s)} in {tables.host_name(one.name, one.operator)}"
            for one in trace.startup[:_MOST_AT_START]
            if one.total_s >= _MUCH_AT_START * whole_s
        ]
        parts = f": {', '.join(longest)}" if longest else ""
        yield (
            f"Before the first step, which counts in no other number here, the host{of_rank} spends "
            f"{duration(whole_s)}{parts}."
        )


def idle_device(capture: Capture, wall_s: float) -> Iterator[str]:
    """Describes the launches for which the device waits, if it does for a large part of a step."""
    overall = capture.mean
    launches = [trace.launches for trace in capture.ranks if trace.launches]
    waits = [row for row in tables.host_waits(capture).rows if not row.get("is_sum")]
    if launches and overall.idle_host_s >= _MUCH_IDLE * wall_s:
        yield _late_launches(capture, launches, waits)
    regions = {row["name"]: row for row in tables.regions(capture).rows}
    for row in waits:
        name, region = row["operator"], regions.get(row["operator"], {"idle_s": 0.0, "num_kernels": 0})
        waits_s = max(row["total_s"], region["idle_s"])
        if row["name"] or waits_s < _SOME * wall_s or region_of(name) != "optimizer":
            continue
        share = f"{duration(waits_s)} ({waits_s / wall_s:.0%})"
        text = f"The device is idle for {share} before the kernels of {name}: "
        if "zero_grad" in name:
            yield f"{text}zero_grad(set_to_none=True) launches none."
        elif (num := region["num_kernels"]) >= _MANY_KERNELS and waits_s < num * _EACH_S:
            fused = " or fused=True" * bool(_HAS_FUSED.search(name))
            yield f"{text}foreach=True{fused} in the optimizer launches fewer."


def ahead_of_device(capture: Capture, wall_s: float) -> Iterator[str]:
    """Says what CUDA graphs launch, and how far the host is ahead if the device does not wait for it."""
    launches = [trace.launches for trace in capture.ranks if trace.launches]
    if not launches:
        return
    most = max(launches, key=lambda stats: stats.outside_graphs_s)
    num_graphs, in_graphs, num_kernels, share = (
        statistics.fmean(getattr(stats, name) for stats in launches)
        for name in ("num_graphs", "num_in_graphs", "num_kernels", "share_of_graphs")
    )
    if num_graphs:
        longest = f"{short(most.outside_graphs)} takes longest outside: {duration(most.outside_graphs_s)}"
        times = counted(max(1, round(num_graphs)), "time")
        yield (
            f"CUDA or HIP graphs (launched {times}{capture.per_step}) run {in_graphs:,.0f} of "
            f"{num_kernels:,.0f} kernels and copies, {share:.0%} of their time"
            f"{f' ({longest})' * bool(most.outside_graphs_s)}."
        )
    ahead_s = statistics.fmean(stats.delay_s for stats in launches)
    waits_s = capture.mean.device_idle_s + capture.mean.comm_exposed_s
    if waits_s < _MUCH_IDLE * wall_s and ahead_s >= _MUCH * wall_s:
        is_free = (
            sum(row["total_s"] for row in _in_steps(tables.blocking_calls(capture).rows)) < _LITTLE * wall_s
        )
        place = "in the steps, " * capture.has_steps
        none = f", and {place}no call of the host waits for long" * is_free
        if statistics.fmean(stats.queue_median for stats in launches) >= _FULL_QUEUE:
            none = ", and calls that launch kernels wait because the queue is full, which costs nothing"
        behind_s = launches[0].behind_s
        behind = f"; the first one starts after {duration(behind_s)}, probably behind earlier work"
        is_behind = not capture.has_steps and behind_s >= _MUCH * wall_s
        yield (
            f"The device limits the speed: its kernels start {duration(ahead_s)} (median) after their launch"
            f"{none}{behind * is_behind}."
        )


def has_long_waits(capture: Capture) -> bool:
    """Returns whether the device waits so long for late launches that launching does not take the time."""
    longest_s = _longest_late_launch_s(capture) * _is_mostly_one_wait(capture)
    return max(_late_launch(capture)[1], longest_s) > _LONG_WAIT_S


def _longest_late_launch_s(capture: Capture) -> float:
    """Returns the longest time in which the device waits for a launch; 0 for several ranks."""
    own = capture.ranks[0].gaps if len(capture.ranks) == 1 else ()
    in_steps = (gap for gap in own if gap.step is not None or not capture.has_steps)
    times = (gap.dur_s for gap in in_steps if region_of(gap.operator) not in ("data", "snapshot"))
    return min(max(times, default=0.0), capture.mean.idle_host_s * capture.num_steps)


def _is_mostly_one_wait(capture: Capture) -> bool:
    all_s = capture.mean.idle_host_s * capture.num_steps
    return _longest_late_launch_s(capture) > _MOST_OF_WAITS * all_s


def _late_launch(capture: Capture) -> tuple[float, float]:
    """Returns the number of late launches per step of a rank, and the mean wait for each of them."""
    num_late = statistics.fmean([one.launches.num_late for one in capture.ranks if one.launches] or [0.0])
    return num_late, capture.mean.idle_host_s / max(1, num_late)


def _late_launches(capture: Capture, launches: Sequence[LaunchStats], waits: Sequence[Row]) -> str:
    """Describes whether the device waits for the host often for a short time, or a few times for long."""
    num_late, wait_s = _late_launch(capture)
    named = [
        f"{short(row['call'])} ({duration(row['total_s'])})"
        for row in waits
        if (row["name"] or row["operator"]) and row["total_s"] >= _MUCH_OF_WAITS * capture.mean.idle_host_s
    ]
    longest_s = _longest_late_launch_s(capture)
    mean = f"for {duration(wait_s)}{' on average' * (num_late * capture.num_steps > 1)}"
    if longest_s > wait_s and duration(longest_s) != duration(wait_s):
        mean += f" (at most {duration(longest_s)})"
    if num_late > 1 and _is_mostly_one_wait(capture):
        mean = f"once{' in all steps' * (capture.num_steps > 1)} for {duration(longest_s)}"
    text = (
        f"The device waits for the host {counted(max(1, round(num_late)), 'time')}{capture.per_step}, "
        f"{mean}{(named and ', longest in ' + ' and '.join(named[:_MOST_NAMED])) or ''}."
    )
    if has_long_waits(capture) or any(stats.num_graphs for stats in launches):
        return text
    num_kernels = statistics.fmean(stats.num_kernels for stats in launches)
    share = sum(stats.num_short for stats in launches) / sum(stats.num_kernels for stats in launches)
    return (
        f"{text} Of {num_kernels:,.0f} kernels and copies, {share:.0%} are shorter than the call that "
        "launches them: larger batches, torch.compile or CUDA graphs reduce the work of the host."
    )
