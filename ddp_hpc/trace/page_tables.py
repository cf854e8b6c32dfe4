"""The page's tables: rows of plain values, and how each column writes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ddp_hpc.tables import Column, Row
from ddp_hpc.trace.model import PARTS, Capture, Times
from ddp_hpc.trace.page_figures import cut, label_of
from ddp_hpc.trace.text import operators
from ddp_hpc.units import format_bytes

MAX_OPS = 25
_MAX_NAME = 200
_TIMES = (*PARTS, "comm_hidden_s")


@dataclass(frozen=True)
class Table:
    """A caption, columns and rows; None is a value that is not known."""

    caption: str
    columns: Sequence[Column]
    rows: Sequence[Row]

    def is_number(self, column: Column) -> bool:
        """Whether it stands to the right, and is sorted as numbers are."""
        known = (row[column.field] for row in self.rows if row[column.field] is not None)
        return not isinstance(next(known, 0), str)

    def write(self, column: Column, row: Row) -> str:
        """The cell's text."""
        value = row[column.field]
        return "-" if value is None else column.write(value)


def ms(seconds: float) -> str:
    """Milliseconds, three digits that count.

    >>> ms(0.0012345), ms(1.5)
    ('1.23', '1,500')
    """
    value = seconds * 1e3
    digits = 0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2 if abs(value) >= 0.9995 else 3
    return f"{value:,.{digits}f}"


def mean_step(captures: Sequence[Capture]) -> Table:
    """The parts of a mean step, in milliseconds and percent, a pair of columns a capture."""
    columns = [Column("part", "part")]
    for number, capture in enumerate(captures):
        name = f"{cut(capture.name, 40)}: " if len(captures) > 1 else ""
        columns += [
            Column(f"time{number}", f"{name}ms", ms),
            Column(f"share{number}", f"{name}share", _share),
        ]
    rows: list[Row] = []
    for field in (*_shown([capture.mean for capture in captures], PARTS), "wall_s", "comm_hidden_s"):
        row: Row = {"part": "step" if field == "wall_s" else label_of(field)}
        for number, capture in enumerate(captures):
            time_s, wall_s = getattr(capture.mean, field), capture.mean.wall_s
            row |= {f"time{number}": time_s, f"share{number}": time_s / wall_s if wall_s > 0 else None}
        rows.append(row)
    return Table("Mean step over ranks and steps", columns, rows)


def _share(value: float) -> str:
    return f"{100 * value:.1f} %"


def _shown(times: Sequence[Times], fields: Sequence[str]) -> list[str]:
    return [field for field in fields if any(getattr(one, field) for one in times)]


def ranks(capture: Capture) -> Table:
    """A row a rank: its host, its mean step, its peak memory."""
    devices = sorted({device for trace in capture.ranks for device in trace.peak_bytes})
    fields = ["wall_s", *_shown(capture.rank_means, _TIMES)]
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
    """A row for each kind and size."""
    columns = [
        Column("kind", "kind", _name),
        Column("group", "group", _name),
        Column("num_ranks", "ranks", _known(str)),
        Column("bytes", "size", _known(format_bytes)),
        Column("num_calls", "calls a rank"),
        Column("total_s", "total a rank, ms", ms),
        Column("median_s", "median, ms", ms),
        Column("transfer_s", "transfer, ms", ms),
        Column("busbw_bytes_per_s", "busbw, GB/s", _known(lambda rate: f"{rate / 1e9:.3f}")),
        Column("slowest_s", "slowest, ms", ms),
        Column("slowest_rank", "its rank"),
        Column("slowest_step", "its step"),
    ]
    if not any(row.group for row in capture.collectives):
        columns = [column for column in columns if column.field != "group"]
    return Table("Collectives", columns, [vars(row) for row in capture.collectives])


def _known(write: Callable[[Any], str]) -> Callable[[Any], str]:
    """Zero stands for what the trace does not tell."""
    return lambda value: write(value) if value else "-"


def ops(capture: Capture, kind: str, caption: str) -> Table:
    """The longest `ops` or `kernels` by self time: the mean of a rank, and the rank where it is largest."""
    rows = operators(capture.ranks, kind)
    columns = [
        Column("name", "name", _name),
        Column("self_s", "self a rank, ms", ms),
        Column("total_s", "total a rank, ms", ms),
        Column("num_calls", "calls a rank"),
        Column("largest_s", "largest self, ms", ms),
        Column("largest_rank", "its rank"),
    ]
    if len(rows) > MAX_OPS:
        caption = f"{caption}: the first {MAX_OPS} of {len(rows):,}"
    return Table(caption, columns, rows[:MAX_OPS])


def _name(text: str) -> str:
    return cut(text, _MAX_NAME) or "-"
