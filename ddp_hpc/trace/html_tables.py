"""The tables of the page: rows of plain values, and a format for each column."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ddp_hpc.base.text_table import Column, Row, cut
from ddp_hpc.base.units import format_bytes
from ddp_hpc.trace.analysis_results import COLUMNS, IDLE_CAUSES, PARTS, Capture, present
from ddp_hpc.trace.event_names import shortened
from ddp_hpc.trace.html_figures import label_of
from ddp_hpc.trace.text_report import CAUSES, launch_columns, launch_rows, operators, path_name

MAX_OPS = 25
_MAX_NAME = 2000
_MAX_SHOWN = 90


@dataclass(frozen=True)
class Table:
    """A caption, columns and rows, in which None is an unknown value."""

    caption: str
    columns: Sequence[Column]
    rows: Sequence[Row]

    def is_number(self, column: Column) -> bool:
        """Returns whether the column is right-aligned and sorted numerically."""
        known = (row[column.field] for row in self.rows if row[column.field] is not None)
        return not isinstance(next(known, 0), str)

    def write(self, column: Column, row: Row) -> str:
        """Returns the text of the cell."""
        value = row[column.field]
        return "-" if value is None else column.write(value)

    def whole(self, column: Column, row: Row) -> str:
        """Returns the whole text of a cell that shows only a part of it, or an empty text."""
        value = row[column.field]
        return cut(value, _MAX_NAME) if isinstance(value, str) and value != self.write(column, row) else ""


def ms(seconds: float) -> str:
    """Formats milliseconds with three significant digits.

    >>> ms(0.0012345), ms(1.5)
    ('1.23', '1,500')
    """
    value = seconds * 1e3
    digits = 0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2 if abs(value) >= 0.9995 else 3
    return f"{value:,.{digits}f}"


def mean_step(captures: Sequence[Capture]) -> Table:
    """Returns the parts of the mean step in milliseconds and percent, with two columns per capture."""
    columns = [Column("part", "part")]
    for number, capture in enumerate(captures):
        name = f"{cut(capture.name, 40)}: " if len(captures) > 1 else ""
        columns += [
            Column(f"time{number}", f"{name}ms", ms),
            Column(f"share{number}", f"{name}share", _share),
        ]
    rows: list[Row] = []
    for field in (*present([capture.mean for capture in captures], PARTS), "wall_s", "comm_hidden_s"):
        row: Row = {"part": "step" if field == "wall_s" else label_of(field)}
        for number, capture in enumerate(captures):
            time_s, wall_s = getattr(capture.mean, field), capture.mean.wall_s
            row |= {f"time{number}": time_s, f"share{number}": time_s / wall_s if wall_s > 0 else None}
        rows.append(row)
    return Table("Mean step over ranks and steps", columns, rows)


def _share(value: float) -> str:
    return f"{100 * value:.1f} %"


def ranks(capture: Capture) -> Table:
    """Returns a row per rank with its host, mean step and peak memory."""
    devices = sorted({device for trace in capture.ranks for device in trace.peak_bytes})
    fields = ["wall_s", *present(capture.rank_means, COLUMNS)]
    columns = [
        Column("rank", "rank"),
        Column("host", "host", _name),
        *(Column(field, f"{'step' if field == 'wall_s' else label_of(field)}, ms", ms) for field in fields),
        *(
            Column(f"peak{i}", f"peak memory, {_name(device)}", format_bytes)
            for i, device in enumerate(devices)
        ),
    ]
    rows: list[Row] = [
        {"rank": trace.rank, "host": trace.host}
        | {field: getattr(mean, field) for field in fields}
        | {f"peak{i}": trace.peak_bytes.get(device) for i, device in enumerate(devices)}
        for trace, mean in zip(capture.ranks, capture.rank_means, strict=True)
    ]
    return Table("Mean step and peak memory of each rank", columns, rows)


def collectives(capture: Capture) -> Table:
    """Returns a row per kind and size of collective."""
    columns = [
        Column("kind", "kind", _name),
        Column("group", "group", _name),
        Column("num_ranks", "ranks", _known(str)),
        Column("bytes", "size", _known(format_bytes)),
        Column("num_calls", "calls per rank"),
        Column("total_s", "total per rank, ms", ms),
        Column("median_s", "median, ms", ms),
        Column("transfer_s", "median transfer, ms", ms),
        Column("busbw_bytes_per_s", "busbw, GB/s", _known(lambda rate: f"{rate / 1e9:.3f}")),
        Column("slowest_s", "slowest, ms", ms),
        Column("slowest_rank", "slowest rank"),
        Column("slowest_step", "slowest step"),
    ]
    if not any(row.group for row in capture.collectives):
        columns = [column for column in columns if column.field != "group"]
    # A duration that includes an unknown waiting time says little about the network.
    unknown = {"transfer_s": None, "busbw_bytes_per_s": None}
    rows = [vars(row) | ({} if row.is_transfer_known else unknown) for row in capture.collectives]
    return Table("Collectives", columns, rows)


def idle(capture: Capture) -> Table:
    """Returns a row per rank with the idle time of its device by cause; no rows if there is no device."""
    causes = present(capture.rank_means, IDLE_CAUSES)
    columns = [Column("rank", "rank"), Column("device_idle_s", "idle per step, ms", ms)]
    columns += [Column(cause, f"{CAUSES[cause]}, ms", ms) for cause in causes]
    rows: list[Row] = [
        {"rank": trace.rank, "device_idle_s": mean.device_idle_s}
        | {cause: getattr(mean, cause) for cause in causes}
        for trace, mean in zip(capture.ranks, capture.rank_means, strict=True)
        if mean.device_idle_s
    ]
    return Table("Idle time of the device by cause", columns, rows)


def launches(capture: Capture) -> Table:
    """Returns a row per rank with its launch statistics; without rows if no launches were recorded."""
    return Table(
        "Kernels and copies that the host launches per step",
        launch_columns(Column("rank", "rank")),
        launch_rows(capture.ranks),
    )


def critical_path(capture: Capture) -> Table:
    """Returns the longest parts of the critical path of a step; without rows if there is none."""
    path = capture.path
    columns = [
        Column("name", "kernel, collective or wait", _name),
        Column("rank", "rank"),
        Column("dur_s", "ms", ms),
        Column("share", "share", _share),
        Column("count", "count"),
    ]
    if path is None:
        return Table("", columns, [])
    rows: list[Row] = [
        vars(row) | {"name": path_name(row), "share": row.dur_s / (path.total_s or 1.0)}
        for row in path.rows[:MAX_OPS]
    ]
    caption = f"Critical path of step {path.step}, {ms(path.total_s)} ms"
    if len(path.rows) > MAX_OPS:
        caption += f": the first {MAX_OPS} of {len(path.rows):,} parts"
    return Table(caption, columns, rows)


def _known(write: Callable[[Any], str]) -> Callable[[Any], str]:
    """Returns a format that shows zero, which means unknown, as a dash."""
    return lambda value: write(value) if value else "-"


def ops(capture: Capture, kind: str, caption: str) -> Table:
    """Returns the `ops` or `kernels` with the longest self time: the mean per rank, and the maximum."""
    rows = operators(capture.ranks, kind)
    # A kernel does not call other kernels, so its self time equals its total time.
    self_time = [Column("self_s", "self per rank, ms", ms)] if kind == "ops" else []
    columns = [
        Column("name", "name", _name),
        *self_time,
        Column("total_s", "total per rank, ms", ms),
        Column("num_calls", "calls per rank"),
        Column("largest_s", "most self on a rank, ms" if self_time else "most on a rank, ms", ms),
        Column("largest_rank", "rank"),
    ]
    if len(rows) > MAX_OPS:
        caption = f"{caption}: the first {MAX_OPS} of {len(rows):,}"
    return Table(caption, columns, rows[:MAX_OPS])


def _name(text: str) -> str:
    return shortened(text, _MAX_SHOWN) or "-"
