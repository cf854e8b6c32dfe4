"""The tables of a report, which the text and the page share: rows of values, and a format for each column."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from ddp_hpc.base.text_table import Column, Row, Table
from ddp_hpc.base.units import duration, format_bytes
from ddp_hpc.trace.analysis_results import (
    AFTER,
    BEFORE,
    COLUMNS,
    IDLE_CAUSES,
    PART_NAMES,
    REGIONS,
    TIMES,
    Capture,
    RankTrace,
    Times,
    present,
)
from ddp_hpc.trace.critical_path import WAIT
from ddp_hpc.trace.event_names import ALL_STEPS
from ddp_hpc.trace.named_results import Memory
from ddp_hpc.trace.slow_steps import shifted_steps
from ddp_hpc.trace.sums_over_ranks import LEAST_S, sums, with_others
from ddp_hpc.trace.table_columns import count, kernel_name, known, long, ms, short, sum_columns

_MOST_GAP_ROWS = 5
_MOST_STEPS = 50
_LEAST_SHARE = 0.01
_OF_KERNELS = (Column("num_kernels", "kernels", count), Column("device_s", "kernels ms", ms))
_OF_WAITS = ("num_calls", "total_s", "largest_s", "smallest_s", "idle_s", "comm_s")


def _parts(rows: Sequence[Row]) -> list[Column]:
    """Returns the columns of the parts of a step that are not zero in all rows."""
    titles = {part: part.removesuffix("_s").replace("comm_", "comm ") for part in COLUMNS}
    if any(row["idle_data_s"] for row in rows):  # a device that waits for data is idle as well
        titles |= {"data_s": "idle: data", "idle_s": "idle: other"}
    return [Column(part, title, ms) for part, title in titles.items() if any(row[part] for row in rows)]


def mean_steps(captures: Sequence[Capture]) -> Table:
    """Returns the parts of the mean step of each capture."""
    rows: list[Row] = [
        {"name": capture.name, "step": capture.mean.wall_s} | vars(capture.mean) for capture in captures
    ]
    title = ("mean step, ms", "step") if captures[0].has_steps else ("recording, ms", "total")
    return Table([Column("name", title[0], short), Column("step", title[1], ms), *_parts(rows)], rows)


def ranks(capture: Capture) -> Table:
    """Returns the mean step of each of several ranks, the rank first that waits least for others."""
    if len(capture.ranks) == 1:
        return Table([], [])
    rows: list[Row] = [
        {"name": f"rank {trace.rank}", "host": trace.host, "step": mean.wall_s}
        | {"own_s": mean.own_s}
        | vars(mean)
        for trace, mean in zip(capture.ranks, capture.rank_means, strict=True)
    ]
    columns = [
        Column("name", "ranks by step without comm, ms"),
        Column("own_s", "step without comm", ms),
        Column("step", "step", ms),
        *_parts(rows),
    ]
    return Table(columns, sorted(rows, key=lambda row: -row["own_s"]))


def host_regions(capture: Capture) -> Table:
    """Returns the time of each region on the host of a device, for each of several ranks; that rank first
    whose host takes longest without waiting in blocking calls.
    """
    common = set.intersection(*({step.number for step in trace.steps} for trace in capture.ranks))
    traces = [one for one in capture.ranks if one.busy and one.host_s and len(capture.ranks) > 1]
    begins = {
        trace.rank: statistics.fmean(
            capture.in_step_s(trace.rank, step.number, (step.on_host or (0.0,))[0])
            for step in trace.steps
            if step.number in common
        )
        for trace in traces
        if common
    }
    rows: list[Row] = []
    for trace in traces:
        row: Row = dict.fromkeys(REGIONS, 0.0) | trace.host_s | {"name": f"rank {trace.rank}"}
        row["begins_s"] = begins[trace.rank] - min(begins.values()) if common else None
        rows.append(row | {"own_s": trace.host_own_s, "blocked_s": trace.blocked_s})
    columns = [
        Column("name", "ranks by step on the host, ms"),
        Column("begins_s", "begins later than the first", ms),
        Column("own_s", "without blocking calls", ms),
        Column("blocked_s", "blocking calls", ms),
        *(Column(name, name, ms) for name in REGIONS if any(row[name] for row in rows)),
    ]
    return Table(columns, sorted(rows, key=lambda row: -row["own_s"]))


def memory(capture: Capture) -> Table:
    """Returns the peak memory of each device of each rank, the largest first."""
    columns = [
        Column("name", "peak memory"),
        Column("host", "host", short),
        Column("device", "device", short),
        Column("allocated_bytes", "allocated", format_bytes),
        Column("reserved_bytes", "reserved", known(format_bytes)),
        Column("step", "in step"),
        Column("callers", "in operator", short),
    ]
    rows: list[Row] = [
        vars(memory)
        | {"name": f"rank {trace.rank}", "host": trace.host}
        | ({"device": f"{memory.device}, since the start"} if memory.is_change else {})
        for trace in capture.ranks
        for memory in device_memory(trace)
        if memory.allocated_bytes > 0
    ]
    is_shown = {"host": len({row["host"] for row in rows}) > 1, "step": capture.has_steps}
    return Table(
        [column for column in columns if is_shown.get(column.field, True)],
        sorted(rows, key=lambda row: -row["allocated_bytes"]),
    )


def device_memory(trace: RankTrace) -> tuple[Memory, ...]:
    """Returns the memory of the devices of a rank, or of the host if it has no other device."""
    return tuple(memory for memory in trace.memory if memory.device != "cpu" or not trace.busy)


def idle(capture: Capture) -> Table:
    """Returns the idle time of the device of each rank by cause."""
    means = capture.rank_means
    rows: list[Row] = [
        {"name": f"rank {trace.rank}", "total": mean.device_idle_s} | vars(mean)
        for trace, mean in zip(capture.ranks, means, strict=True)
        if mean.device_idle_s
    ]
    columns = [Column("name", "idle device, ms"), Column("total", "total", ms)]
    columns += [Column(cause, PART_NAMES[cause], ms) for cause in present(means, IDLE_CAUSES)]
    return Table(columns, rows)


def host_waits(capture: Capture) -> Table:
    """Returns what the host does while the device waits for launches that have not begun."""
    column = Column("call", "what the host does during late launches,", short)
    first, calls, idle, *others = sum_columns(capture, column, "ms")
    share = Column("share", f"share of {capture.a_step}", "{:.1%}".format)
    rows = [
        row | {"call": host_name(row["name"], row["operator"])}
        for row in sums(capture, "host_waits", ("name", "operator"), "total_s")
        if row["total_s"] >= LEAST_S
    ]
    for row in (rows := with_others(capture, rows, "call")):
        row["share"] = row["total_s"] / (capture.mean.wall_s or 1.0)
    return Table([first, share, calls, replace(idle, title="device idle ms"), *others], rows)


def host_name(call: str, operator: str) -> str:
    """Returns what the host does, from a call of the runtime and the operator around it, of which each can
    be empty.
    """
    return " in ".join(filter(None, (call, operator))) or "Python, or code that was not recorded"


def blocking_calls(capture: Capture) -> Table:
    """Returns the waits of the host in calls of the device's runtime and elsewhere, the longest first."""
    first, *others = sum_columns(capture, Column("call", "waits of the host", short), "ms")
    rows = []
    for row in sums(capture, "blocking_calls", ("name", "operator", "annotation", "reason"), "total_s"):
        if max(row["total_s"], row["idle_s"]) >= LEAST_S:
            is_once = row["annotation"] in (AFTER, BEFORE)
            num_steps = capture.num_steps if is_once else 1
            whole = {name: row[name] * num_steps for name in _OF_WAITS}
            rows.append(row | whole | {"call": host_name(row["name"], row["operator"])})
    rows = with_others(capture, sorted(rows, key=lambda row: -row["total_s"]), "call")
    num = len(capture.ranks) * capture.num_steps
    reason = [Column("reason", "waits for", known(short))] if any(row["reason"] for row in rows) else []
    columns = [first, Column("annotation", "inside", known(short)), *reason, *others[:1]]
    columns += [Column("num_all", "calls in all", "{:,}".format)] * (num > 1) + others[1:]
    if len(capture.ranks) > 1:
        columns += [Column("smallest_s", "least ms on a rank", ms), Column("smallest_rank", "rank")]
    if any(row["comm_s"] >= LEAST_S for row in rows):
        columns.append(Column("comm_s", "collectives run ms", ms))
    return Table([*columns, Column("idle_s", "device idle ms", ms)] if capture.on_device else columns, rows)


def gaps(capture: Capture) -> Table:
    """Returns where the host was in the longest times in which a device did nothing, the longest of each."""
    columns = [
        Column("call", "longest gaps of the device, the host is in", short),
        Column("num_gaps", "of the 10 longest" + " of each rank" * (len(capture.ranks) > 1)),
        Column("total_s", "total", duration),
        Column("dur_s", "longest", duration),
        Column("rank", "on rank"),
        Column("step", "in step"),
        Column("after_s", "begins after ms" + (" of the step" if capture.has_steps else ""), ms),
        Column("kernel", "kernel after it", kernel_name(capture)),
    ]
    rows: dict[tuple[str, bool], Row] = {}
    for gap, rank in sorted(
        ((gap, trace.rank) for trace in capture.ranks for gap in trace.gaps), key=lambda one: -one[0].dur_s
    ):
        place = host_name(gap.call, gap.operator)
        known = {"rank": rank, "call": place, "kernel": gap.kernel or "-", "num_gaps": 0, "total_s": 0.0}
        known["after_s"] = capture.in_step_s(rank, gap.step, gap.after_s)
        row = rows.setdefault((place, gap.step is None), vars(gap) | known)
        row |= {"num_gaps": row["num_gaps"] + 1, "total_s": row["total_s"] + gap.dur_s}
    hidden = {"rank": len(capture.ranks) == 1, "step": not capture.has_steps}
    shown = sorted(rows.values(), key=lambda row: -row["total_s"])[:_MOST_GAP_ROWS]
    return Table([column for column in columns if not hidden.get(column.field)], shown)


def critical_path(capture: Capture) -> Table:
    """Returns the parts of the critical path of a step; for one stream, other tables contain them."""
    path = capture.path
    streams = {kernel.stream for trace in capture.ranks for kernel in trace.kernels}
    if path is None or (len(capture.ranks) == 1 and len(streams) < 2):
        return Table([], [])
    of_step = f" of step {path.step}" if capture.has_steps else ""
    if len(capture.ranks) > 1:
        of_step += f": {duration(path.total_s)}, from rank {path.begin_rank} to rank {path.end_rank}"
    columns = [
        Column("name", f"critical path{of_step}", kernel_name(capture)),
        Column("rank", "rank"),
        Column("dur_s", "ms", ms),
        Column("share", "share", "{:.0%}".format),
        Column("count", "count"),
    ]
    rows = [
        vars(row)
        | {"name": "wait " * (row.kind == WAIT) + row.name, "share": row.dur_s / (path.total_s or 1.0)}
        for row in path.rows
    ]
    return Table(columns, rows)


def collectives(capture: Capture) -> Table:
    """Returns a row per kind and size of collective."""
    columns = [
        Column("kind", f"collectives{capture.per_step}", short),
        Column("bytes", "size", known(format_bytes)),
        Column("num_ranks", "ranks", known(str)),
        Column("num_calls", "calls", count),
        Column("total_s", "total ms", ms),
        Column("exposed_s", "exposed ms", ms),
        Column("median_s", "median ms", ms),
        Column("transfer_s", "median transfer ms", ms),
        Column("busbw_bytes_per_s", "busbw GB/s", lambda busbw: f"{busbw / 1e9:.3f}"),
        Column("slowest_s", "slowest ms", ms),
        Column("slowest", "on rank, step" if capture.has_steps else "on rank"),
        Column("slowest_in", "the slowest is launched in", known(short)),
        Column("blocks", "blocks (at most as many SMs)", count),
    ]
    rows: list[Row] = []
    for row in capture.collectives:
        step = f", {'-' if row.slowest_step is None else row.slowest_step}" * capture.has_steps
        rows.append(
            vars(row)
            | {name: getattr(row, name) / capture.num_steps for name in ("num_calls", "total_s", "exposed_s")}
            | {"slowest": f"{row.slowest_rank}{step}"}
        )
    optional = ("bytes", "busbw_bytes_per_s", "blocks", "slowest_in")
    unknown = {name for name in optional if not any(row[name] for row in rows)}
    return Table([column for column in columns if column.field not in unknown], rows)


def steps(capture: Capture) -> Table:
    """Returns the parts of each step, the mean of the ranks, with the rank that takes longest, and what slow
    steps have more of than the others on the rank with the largest difference; of many steps, the slow ones.
    """
    slow = [
        vars(slow)
        | {"rank": trace.rank, "part_name": "idle: " * (slow.part in IDLE_CAUSES) + PART_NAMES[slow.part]}
        for trace in capture.ranks
        for slow in trace.slow_steps
    ]
    # Of the ranks, one that is slow itself rather than waiting for it in a collective.
    order = sorted(slow, key=lambda row: (row["part"] != "comm_exposed_s", row["excess_s"]))
    more = {row["step"]: row for row in order}
    has_kernels = any(row["kernel"] for row in more.values())
    columns = [
        *[Column("rank", "slow on rank")] * (len(capture.ranks) > 1),
        Column("excess_s", "more than the others ms", ms),
        Column("part_name", "most of it is"),
        Column("part_s", "more ms", known(ms)),
        Column("call", "on the host in", known(short)),
        Column("call_s", "more ms", known(ms)),
        *[Column("kernel", "in kernel", known(kernel_name(capture)))] * has_kernels,
        *[Column("kernel_s", "more ms", known(ms))] * has_kernels,
    ] * bool(more)
    own: defaultdict[int, list[tuple[float, int, Times]]] = defaultdict(list)
    for trace in capture.ranks:
        for step in trace.steps:
            own[step.number].append((step.times.wall_s, trace.rank, step.times))
    rows: list[Row] = []
    shifted = shifted_steps(capture.ranks)
    for number, found in sorted(own.items()):
        mean = Times(**{name: statistics.fmean(getattr(one, name) for *_, one in found) for name in TIMES})
        largest_s, rank, _ = max(found, key=lambda one: one[:2])
        row = dict.fromkeys(column.field for column in columns) | more.get(number, {}) | vars(mean)
        row |= {"name": f"step {number}", "step": mean.wall_s, "largest_s": largest_s, "largest_rank": rank}
        row |= {"busy_s": mean.wall_s - mean.device_idle_s, "order": "first: see Notes" * (number in shifted)}
        rows.append(row)
    by_length = sorted((row for row in rows if not row["order"]), key=lambda row: row["step"])
    if by_length and ms(by_length[0]["step"]) != ms(by_length[-1]["step"]):
        by_length[0]["order"], by_length[-1]["order"] = "shortest", "longest"
    if len(rows) > _MOST_STEPS:
        rows = [row for row in rows if row.get("excess_s")]
    elif len(rows) == 1 or not capture.has_steps:
        return Table([], [])
    parts = [Column("name", "steps, ms"), Column("order", "it is the"), Column("step", "step", ms)]
    ranks = [Column("largest_s", "most ms on a rank", ms), Column("largest_rank", "rank")]
    busy = [Column("busy_s", "busy", ms)] * capture.on_device
    parts += [*ranks * (len(capture.ranks) > 1), *columns, *busy, *_parts(rows)]
    if rows:
        step_s, idle_s = capture.mean.wall_s, capture.mean.device_idle_s
        own_mean: Row = dict.fromkeys(rows[0]) | vars(capture.mean) | {"name": "mean"}
        rows.append(own_mean | {"step": step_s, "busy_s": step_s - idle_s})
    return Table(parts, rows)


def regions(capture: Capture) -> Table:
    """Returns the annotations and modules, those with the longest time of kernels or on the host first."""
    order, unit = ("device_s", "kernel ms") if capture.on_device else ("total_s", "ms")
    first, calls, host, *others = sum_columns(capture, Column("name", "annotations and modules", short), unit)
    rows = with_others(capture, sums(capture, "regions", ("name", "depth"), order), "name")
    columns = [first, calls, replace(host, title="host ms")]
    if capture.on_device:
        columns += [
            *_OF_KERNELS,
            *[Column("comm_s", "collectives ms", ms)] * any(row["comm_s"] for row in rows),
        ]
        columns.append(Column("idle_s", "idle before its kernels ms", ms))
    if any(row["num"] for row in rows):
        columns += [Column("num", "modules", known(str)), Column("longest_at", "longest module", known(str))]
        columns.append(Column("longest_s", "its host ms", known(ms)))
    return Table([*columns, *others], rows)


def functions(capture: Capture) -> Table:
    """Returns the Python functions that take, or whose kernels take, at least 1 % of a step."""
    first = Column("name", "Python functions (calls of at least 20 us)", long)
    return _of_at_least(capture, "functions", first)


def host_threads(capture: Capture) -> Table:
    """Returns the threads of the first rank's host for which the same is true, if there are several."""
    of_rank = f" of rank {capture.ranks[0].rank}" * (len(capture.ranks) > 1)
    first = Column("name", f"threads of the host{of_rank}")
    found = _of_at_least(replace(capture, ranks=capture.ranks[:1]), "threads", first)
    columns = [found.columns[0], Column("longest_at", "mostly runs", short), *found.columns[1:]]
    return Table(columns, found.rows if len(found.rows) > 1 else [])


def _of_at_least(capture: Capture, field: str, column: Column) -> Table:
    first, calls, host, *others = sum_columns(capture, column, "host ms")
    rows = sums(capture, field, ("name",), "total_s")
    longest = {row["name"]: max(row["total_s"], row["device_s"]) for row in rows}
    rows = [row for row in rows if longest[row["name"]] >= _LEAST_SHARE * capture.mean.wall_s]
    columns = [first, calls, replace(host, title="host ms"), *_OF_KERNELS * capture.on_device, *others]
    return Table(columns, sorted(rows, key=lambda row: -longest[row["name"]]))


def operators(capture: Capture) -> Table:
    """Returns the operators of the host with the longest self time.

    Regions are omitted, because they have a table of their own and include the times of operators.
    """
    marked = {region.name for trace in capture.ranks for region in trace.regions} | {ALL_STEPS}
    first, calls, *others = sum_columns(capture, Column("name", "operators (host)", short), "self ms")
    rows = [row for row in sums(capture, "ops", ("name",), "self_s") if row["name"] not in marked]
    device = [Column("device_s", "kernels ms", ms)] if any(row["device_s"] for row in rows) else []
    columns = [first, calls, Column("self_s", "self ms", ms), *others, *device]
    return Table(columns, with_others(capture, rows, "name"))
