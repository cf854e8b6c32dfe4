"""Formats the report as plain text for a terminal."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from ddp_hpc.text_table import Column, Row, cut, table
from ddp_hpc.trace.event_names import ALL_STEPS, region_of
from ddp_hpc.trace.trace_records import TIMES, Capture, RankTrace, Times
from ddp_hpc.units import format_bytes

_MOST_RANKS = 8
_MOST_ROWS = 10
_MOST_NOTES = 20
_NAME_LENGTH = 60


def text(captures: Sequence[Capture], sentences: Sequence[str]) -> str:
    """Formats the first capture in full and the mean steps of the others; `sentences` describe changes."""
    capture = captures[0]
    blocks = [_head(capture), "\n".join((*sentences, *capture.findings)), _steps(captures)]
    if len(captures) == 1 and len(capture.ranks) > 1:
        blocks.append(_ranks(capture))
    blocks += [block for block in (_collectives(capture), *_operators(capture), _memory(capture)) if block]
    for one in captures:
        if one.notes:
            more = len(one.notes) - _MOST_NOTES
            lines = [
                f"notes on {one.name}:",
                *(f"  {note}" for note in one.notes[:_MOST_NOTES]),
            ]
            blocks.append("\n".join(lines + ([f"  and {more} more (see --json)"] if more > 0 else [])))
    return "\n\n".join("\n".join(map(printable, block.splitlines())) for block in blocks) + "\n"


def printable(line: str) -> str:
    """Replaces control characters, which a terminal would interpret."""
    return "".join(letter if letter.isprintable() else "?" for letter in line)


def _head(capture: Capture) -> str:
    hosts = sorted({trace.host for trace in capture.ranks if trace.host})
    steps = sorted({len(trace.steps) for trace in capture.ranks})
    return (
        f"{capture.name}: {len(capture.ranks)} of {capture.world_size} ranks, "
        f"{' to '.join(map(str, {steps[0]: 0, steps[-1]: 0}))} steps each, on {capture.ranks[0].device}"
        + (f", hosts: {', '.join(hosts[:4])}{', ...' if len(hosts) > 4 else ''}" if hosts else "")
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"


def _times_row(name: str, times: Times) -> Row:
    return {"name": name, "step": times.wall_s} | {part: getattr(times, part) for part in TIMES}


def _times_table(title: str, rows: Sequence[Row]) -> str:
    shown = [part for part in TIMES if any(row[part] for row in rows)]
    columns = [Column("name", title), Column("step", "step", _ms)]
    columns += [Column(part, part.removesuffix("_s").replace("comm_", "comm "), _ms) for part in shown]
    return table(columns, rows)


def _steps(captures: Sequence[Capture]) -> str:
    return _times_table("mean step, ms", [_times_row(one.name, one.mean) for one in captures])


def _ranks(capture: Capture) -> str:
    pairs = sorted(
        zip(capture.ranks, capture.rank_means, strict=True),
        key=lambda pair: pair[1].comm_exposed_s - pair[1].wall_s,
    )
    rows = [_times_row(f"rank {trace.rank}", times) for trace, times in pairs[:_MOST_RANKS]]
    few = len(pairs) > _MOST_RANKS
    return _times_table(f"{_MOST_RANKS} slowest ranks, ms" if few else "slowest rank first, ms", rows)


def _collectives(capture: Capture) -> str:
    columns = [
        Column("kind", "collective"),
        Column("bytes", "size", lambda size: format_bytes(size) if size else "-"),
        Column("num_ranks", "ranks", lambda ranks: str(ranks) if ranks else "-"),
        Column("num_calls", "calls"),
        Column("total_s", "total ms", _ms),
        Column("median_s", "median ms", _ms),
        Column("transfer_s", "transfer ms", _ms),
        Column("busbw_bytes_per_s", "busbw GB/s", lambda rate: f"{rate / 1e9:.3f}" if rate else "-"),
        Column("slowest_s", "slowest ms", _ms),
        Column("slowest", "rank, step"),
    ]
    rows = [
        vars(row)
        | {"slowest": f"{row.slowest_rank}, {'-' if row.slowest_step is None else row.slowest_step}"}
        for row in capture.collectives[:_MOST_ROWS]
    ]
    return table(columns, rows) if rows else ""


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
    for kind, title in (("kernels", "kernel"), ("ops", "operator")):
        if rows := operators(capture.ranks, kind)[:_MOST_ROWS]:
            yield table(
                [
                    Column("name", title, _short),
                    Column("num_calls", "calls per rank"),
                    Column("self_s", "self ms", _ms),
                    Column("total_s", "total ms", _ms),
                    Column("largest_s", "maximum self ms", _ms),
                    Column("largest_rank", "on rank"),
                ],
                rows,
            )


def _short(name: str) -> str:
    return cut(name, _NAME_LENGTH)


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
