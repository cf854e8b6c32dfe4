"""The page's tables: rows of plain values, and how each column writes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from ddp_hpc.trace.model import PARTS, Capture, Op, RankTrace
from ddp_hpc.trace.page_figures import cut, label_of, part_of
from ddp_hpc.units import format_bytes

MAX_OPS = 25
_MAX_NAME = 200


@dataclass(frozen=True)
class Column:
    """A heading, and how a value is written; numbers stand to the right and are sorted as such."""

    title: str
    write: Callable[[Any], str] = str
    is_number: bool = True


@dataclass(frozen=True)
class Table:
    """A caption, columns and rows; None is a value that is not known."""

    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Any, ...], ...]


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
    columns = [Column("part", is_number=False)]
    for capture in captures:
        name = f"{cut(capture.name, 40)}: " if len(captures) > 1 else ""
        columns += [Column(f"{name}ms", ms), Column("share" if not name else f"{name}share", _share)]
    rows = [
        (label_of(part_of(field)), *_time_and_share(captures, attrgetter(field)))
        for field in (*PARTS, "comm_hidden_s")
    ]
    rows.insert(len(PARTS), ("step", *_time_and_share(captures, attrgetter("wall_s"))))
    return Table("Mean step over ranks and steps", tuple(columns), tuple(rows))


def _time_and_share(captures: Sequence[Capture], time_s: Callable[[Any], float]) -> Iterable[float | None]:
    for capture in captures:
        yield time_s(capture.mean)
        yield time_s(capture.mean) / capture.mean.wall_s if capture.mean.wall_s > 0 else None


def _share(value: float) -> str:
    return f"{100 * value:.1f} %"


def ranks(capture: Capture) -> Table:
    """A row a rank: its host, its mean step, its peak memory."""
    devices = sorted({device for trace in capture.ranks for device in trace.peak_bytes})
    fields = (*PARTS, "comm_hidden_s")
    columns = (
        Column("rank"), Column("host", _name, is_number=False), Column("step, ms", ms),
        *(Column(f"{label_of(part_of(field))}, ms", ms) for field in fields),
        *(Column(f"peak memory, {_name(device)}", format_bytes) for device in devices),
    )  # fmt: skip
    rows = tuple(
        (trace.rank, trace.host, mean.wall_s, *(getattr(mean, field) for field in fields),
         *(trace.peak_bytes.get(device) for device in devices))
        for trace, mean in zip(capture.ranks, capture.rank_means, strict=True)
    )  # fmt: skip
    return Table("Mean step and peak memory of each rank", columns, rows)


def collectives(capture: Capture) -> Table:
    """A row for each kind and size."""
    columns = (
        Column("kind", _name, is_number=False), Column("group", _name, is_number=False), Column("ranks"),
        Column("bytes", format_bytes), Column("calls a rank", _count), Column("median, ms", ms),
        Column("transfer, ms", ms), Column("bus bandwidth, GB/s", lambda rate: f"{rate / 1e9:,.3g}"),
        Column("total a rank, ms", ms), Column("slowest, ms", ms), Column("its rank"), Column("its step"),
    )  # fmt: skip
    rows = tuple(
        (row.kind, row.group, row.num_ranks, row.bytes, row.num_calls, row.median_s, row.transfer_s,
         row.busbw_bytes_per_s, row.total_s, row.slowest_s, row.slowest_rank, row.slowest_step)
        for row in capture.collectives
    )  # fmt: skip
    return Table("Collectives, the one that takes most time first", columns, rows)


def ops(capture: Capture, of: Callable[[RankTrace], Sequence[Op]], caption: str) -> Table:
    """The longest by self time over all ranks: the mean of a rank, and the rank where it is largest."""
    found: dict[str, list[tuple[int, Op]]] = {}
    for trace in capture.ranks:
        for op in of(trace):
            found.setdefault(op.name, []).append((trace.rank, op))
    num_ranks = max(len(capture.ranks), 1)
    rows = []
    for name, calls in found.items():
        rank, largest = max(calls, key=lambda call: call[1].self_s)
        self_s = sum(op.self_s for _, op in calls) / num_ranks
        num_calls = sum(op.num_calls for _, op in calls) / num_ranks
        rows.append((name, self_s, num_calls, largest.self_s, rank))
    rows.sort(key=lambda row: row[1], reverse=True)
    columns = (
        Column("name", _name, is_number=False), Column("self time a rank, ms", ms),
        Column("calls a rank", _count), Column("largest, ms", ms), Column("its rank"),
    )  # fmt: skip
    if len(rows) > MAX_OPS:
        caption = f"{caption}: the first {MAX_OPS} of {len(rows):,}"
    return Table(caption, columns, tuple(rows[:MAX_OPS]))


def _name(text: str) -> str:
    return cut(text, _MAX_NAME) or "-"


def _count(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:,.1f}"
