"""Formats the report as plain text for a terminal."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from ddp_hpc.base.text_table import Column, Row, printable, table
from ddp_hpc.base.units import counted, format_bytes
from ddp_hpc.trace.analysis_results import COLUMNS, Capture, CollectiveRow, PathRow, RankTrace, Times
from ddp_hpc.trace.critical_path import WAIT
from ddp_hpc.trace.event_names import ALL_STEPS, region_of, shortened

_MOST_RANKS = 8
_MOST_ROWS = 10
_MOST_NOTES = 20
_NAME_LENGTH = 60
CAUSES = {
    "idle_host_s": "late launch",
    "idle_data_s": "data",
    "idle_snapshot_s": "snapshot",
    "idle_kernel_s": "kernel queued",
    "idle_other_s": "not recorded",
}
"""The headings of the causes of idle time."""


def text(captures: Sequence[Capture], sentences: Sequence[str]) -> str:
    """Formats the first capture in full and the mean steps of the others; `sentences` describe changes."""
    capture = captures[0]
    warnings = [warning for one in captures for warning in one.warnings]
    blocks = [_head(capture), "\n".join(warnings), "\n".join((*sentences, *capture.findings))]
    blocks.append(_steps(captures))
    if len(captures) == 1 and len(capture.ranks) > 1:
        blocks.append(_ranks(capture))
    blocks += [_idle(captures), _launches(capture), _critical_path(capture), _collectives(capture)]
    blocks += [*_operators(capture), _memory(capture)]
    for one in captures:
        if one.notes:
            more = len(one.notes) - _MOST_NOTES
            lines = [
                f"notes on {one.name}:",
                *(f"  {note}" for note in one.notes[:_MOST_NOTES]),
            ]
            blocks.append("\n".join(lines + ([f"  and {more} more (see --json)"] if more > 0 else [])))
    return "\n\n".join("\n".join(map(printable, block.splitlines())) for block in blocks if block) + "\n"


def _head(capture: Capture) -> str:
    hosts = sorted({trace.host for trace in capture.ranks if trace.host})
    steps = sorted({len(trace.steps) for trace in capture.ranks})
    most = f"{steps[0]} to " if steps[0] < steps[-1] else ""
    each = " each" if len(capture.ranks) > 1 else ""
    devices = sorted({trace.device_name for trace in capture.ranks if trace.device_name})
    return (
        f"{capture.name}: {len(capture.ranks)} of {counted(capture.world_size, 'rank')}, "
        f"{most}{counted(steps[-1], 'step')}{each}, on {capture.ranks[0].device}"
        + (f" ({', '.join(devices)})" if devices else "")
        + (f", hosts: {', '.join(hosts[:4])}{', ...' if len(hosts) > 4 else ''}" if hosts else "")
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"


def _times_row(name: str, times: Times) -> Row:
    return {"name": name, "step": times.wall_s} | {part: getattr(times, part) for part in COLUMNS}


def _times_table(title: str, rows: Sequence[Row], *more: Column) -> str:
    shown = [part for part in COLUMNS if any(row[part] for row in rows)]
    columns = [Column("name", title), Column("step", "step", _ms), *more]
    columns += [Column(part, part.removesuffix("_s").replace("comm_", "comm "), _ms) for part in shown]
    return table(columns, rows)


def _steps(captures: Sequence[Capture]) -> str:
    return _times_table("mean step, ms", [_times_row(one.name, one.mean) for one in captures])


def _ranks(capture: Capture) -> str:
    rows = [
        _times_row(f"rank {trace.rank}", times) | {"own_s": times.wall_s - times.comm_exposed_s}
        for trace, times in zip(capture.ranks, capture.rank_means, strict=True)
    ]
    rows.sort(key=lambda row: -row["own_s"])
    # Exposed communication includes the time of waiting for slower ranks.
    own = Column("own_s", "step without comm", _ms)
    title = f"{_MOST_RANKS} slowest ranks, ms" if len(rows) > _MOST_RANKS else "slowest rank first, ms"
    return _times_table(title, rows[:_MOST_RANKS], own)


def _idle(captures: Sequence[Capture]) -> str:
    """Returns a table of the device's idle time by cause, or an empty text without a device."""
    columns = [Column("name", "idle device, ms"), Column("device_idle_s", "total", _ms)]
    columns += [Column(cause, title, _ms) for cause, title in CAUSES.items()]
    rows: list[Row] = [
        {"name": one.name} | {column.field: getattr(one.mean, column.field) for column in columns[1:]}
        for one in captures
        if one.mean.device_idle_s
    ]
    columns[2:] = [column for column in columns[2:] if any(row[column.field] for row in rows)]
    return table(columns, rows) if rows else ""


def launch_rows(ranks: Sequence[RankTrace]) -> list[Row]:
    """Returns the launch statistics of each rank that has some."""
    return [{"rank": trace.rank} | vars(trace.launches) for trace in ranks if trace.launches]


def launch_columns(first: Column) -> list[Column]:
    """Returns the columns of the launch statistics after the given one."""
    return [
        first,
        Column("num_calls", "launch calls", "{:,.0f}".format),
        Column("num_kernels", "kernels", "{:,.0f}".format),
        Column("num_late", "launched late", "{:,.0f}".format),
        Column("num_short", "shorter than launch call", "{:,.0f}".format),
        Column("call_s", "median launch call, us", _us),
        Column("delay_s", "median launch to start, us", _us),
    ]


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:,.1f}"


def _launches(capture: Capture) -> str:
    rows = launch_rows(capture.ranks)
    if not rows:
        return ""
    fields = [column.field for column in launch_columns(Column("name", ""))[1:]]
    mean: Row = {"name": "mean of ranks" if len(rows) > 1 else f"rank {rows[0]['rank']}"}
    mean |= {field: statistics.fmean(row[field] for row in rows) for field in fields}
    return table(launch_columns(Column("name", "launches per step")), [mean])


def path_name(row: PathRow) -> str:
    """Returns what a row of the critical path shows: a kernel, a collective or a wait."""
    return f"wait {row.name}" if row.kind == WAIT else row.name


def _critical_path(capture: Capture) -> str:
    if not (path := capture.path) or not path.rows:
        return ""
    rows: list[Row] = [
        vars(row) | {"name": path_name(row), "share": row.dur_s / (path.total_s or 1.0)}
        for row in path.rows[:_MOST_ROWS]
    ]
    return table(
        [
            Column("name", f"critical path of step {path.step}", _short),
            Column("rank", "rank"),
            Column("dur_s", "ms", _ms),
            Column("share", "share", "{:.0%}".format),
            Column("count", "count"),
        ],
        rows,
    )


def _collectives(capture: Capture) -> str:
    columns = [
        Column("kind", f"collectives in {_num_steps(capture)}"),
        Column("bytes", "size", lambda size: format_bytes(size) if size else "-"),
        Column("num_ranks", "ranks", lambda ranks: str(ranks) if ranks else "-"),
        Column("num_calls", "calls per rank"),
        Column("total_s", "total ms per rank", _ms),
        Column("median_s", "median ms", _ms),
        Column("transfer", "median transfer ms"),
        Column("busbw", "busbw GB/s"),
        Column("slowest_s", "slowest ms", _ms),
        Column("slowest", "on rank, step"),
    ]
    rows = [
        vars(row)
        | {"transfer": _ms(row.transfer_s) if row.is_transfer_known else "-", "busbw": busbw(row)}
        | {"slowest": f"{row.slowest_rank}, {'-' if row.slowest_step is None else row.slowest_step}"}
        for row in capture.collectives[:_MOST_ROWS]
    ]
    for field in ("bytes", "busbw"):
        if all(row[field] in (0, "-") for row in rows):
            columns = [column for column in columns if column.field != field]
    return table(columns, rows) if rows else ""


def _num_steps(capture: Capture) -> str:
    return counted(max(len(trace.steps) for trace in capture.ranks), "step")


def busbw(row: CollectiveRow) -> str:
    """Returns the bus bandwidth in GB/s. It is a lower bound if the time of waiting is unknown."""
    if not row.busbw_bytes_per_s:
        return "-"
    return f"{'' if row.is_transfer_known else '>'}{row.busbw_bytes_per_s / 1e9:.3f}"


def operators(ranks: Sequence[RankTrace], kind: str) -> list[Row]:
    """Returns the `ops` or `kernels` of all ranks: the mean per rank, and the rank with the maximum.

    Regions are omitted, because they are shown elsewhere and include the times of operators.
    """
    by_name: dict[str, list[tuple[float, int, int, float]]] = {}
    for trace in ranks:
        for op in getattr(trace, kind):
            if op.name == ALL_STEPS or (region_of(op.name) and not op.name.startswith("autograd::")):
                continue
            by_name.setdefault(op.name, []).append((op.self_s, trace.rank, op.num_calls, op.total_s))
    rows: list[Row] = [
        {
            "name": name,
            "num_calls": round(sum(calls for _, _, calls, _ in own) / len(ranks)),
            "self_s": sum(self_s for self_s, _, _, _ in own) / len(ranks),
            "total_s": sum(total_s for _, _, _, total_s in own) / len(ranks),
            "largest_s": max(own)[0],
            "largest_rank": max(own)[1],
        }
        for name, own in by_name.items()
    ]
    return sorted(rows, key=lambda row: -row["self_s"])


def _operators(capture: Capture) -> Iterator[str]:
    for kind, title in (("kernels", "kernels"), ("ops", "operators (host)")):
        if rows := operators(capture.ranks, kind)[:_MOST_ROWS]:
            # A kernel does not call other kernels, so its self time equals its total time.
            self_time = [Column("self_s", "self ms", _ms)] if kind == "ops" else []
            columns = [
                Column("name", f"{title} in {_num_steps(capture)}", _short),
                Column("num_calls", "calls per rank" if len(capture.ranks) > 1 else "calls"),
                *self_time,
                Column("total_s", "total ms", _ms),
            ]
            if len(capture.ranks) > 1:
                columns[-1] = Column("total_s", "total ms per rank", _ms)
                columns.append(Column("largest_s", f"most {'self ' if self_time else ''}ms on a rank", _ms))
                columns.append(Column("largest_rank", "rank"))
            yield table(columns, rows)


def _short(name: str) -> str:
    return shortened(name, _NAME_LENGTH)


def _memory(capture: Capture) -> str:
    kinds: dict[str, list[tuple[int, int]]] = {}
    for trace in capture.ranks:
        for device, peak in trace.peak_bytes.items():
            kinds.setdefault(device.partition(":")[0], []).append((peak, trace.rank))
    lines = [
        f"peak {device} memory while recording: {format_bytes(max(peaks)[0])} "
        f"(rank {max(peaks)[1]}), median {format_bytes(statistics.median(peak for peak, _ in peaks))}"
        for device, peaks in sorted(kinds.items())
        if max(peaks)[0]
    ]
    return "\n".join(lines)
