"""The timeline of the page: the regions of each rank and, below them, its collectives."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from ddp_hpc.trace.page_figures import COLORS, Figure, axis, base_layout, milliseconds, plain
from ddp_hpc.trace.trace_records import PARTS, REGIONS, Capture, RankTrace, Times
from ddp_hpc.units import format_bytes

_Steps: TypeAlias = tuple[tuple[int, float, float], ...]

MAX_RANKS = 32
MAX_SPANS = 10_000
_MAX_MARKS = 200
_WAITS = ("comm_exposed_s", "idle_s")
_ROW_PX = 30
# A row has height 1, with the lane of the regions above the thinner lane of the collectives.
_REGION_LANE = {"offset": -0.12, "width": 0.52}
_COLLECTIVE_LANE = {"offset": 0.3, "width": 0.22}


@dataclass(frozen=True)
class Timeline:
    """The timeline of a capture, and notes on what it omits."""

    figure: Figure
    ranks: tuple[int, ...]
    """The ranks shown, from top to bottom."""
    steps: _Steps
    """Number, start and end of each step in milliseconds of the figure, over all ranks shown."""
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Bar:
    category: str
    """The name of a region, or `collective`."""
    row: int
    start_s: float
    dur_s: float
    step: int | None
    what: str


def timeline(capture: Capture, max_spans: int = MAX_SPANS) -> Timeline:
    """Returns a timeline of at most `MAX_RANKS` ranks and the `max_spans` longest bars."""
    drawn, notes = _choose_ranks(capture)
    bars = [bar for row, trace in enumerate(drawn) for bar in _bars(trace, row)]
    if len(bars) > max_spans:
        num_omitted = len(bars) - max_spans
        bars = heapq.nlargest(max_spans, bars, key=lambda bar: bar.dur_s)
        notes.append(f"The {num_omitted:,} shortest of {num_omitted + max_spans:,} spans are not shown")
    begins = [bar.start_s for bar in bars] + [step.start_s for trace in drawn for step in trace.steps]
    zero_s = min(begins, default=0.0)
    steps = _steps(drawn, zero_s)
    ends = [bar.start_s + bar.dur_s - zero_s for bar in bars]
    end = max([milliseconds(max(ends, default=0.0)), *(end for *_, end in steps), 1.0])
    data = [
        _trace(category, some, zero_s)
        for category in (*REGIONS, "collective")
        if (some := [bar for bar in bars if bar.category == category])
    ]
    layout = base_layout() | {
        "margin": {"l": 12, "r": 12, "t": 28, "b": 12},
        "barmode": "overlay",
        "dragmode": "zoom",
        "shapes": [_mark(start) for _, start, _ in steps[:: -(-len(steps) // _MAX_MARKS) or 1]],
        "annotations": _numbers(steps, end),
        "xaxis": axis("milliseconds", range=[0, end], showgrid=False),
        "yaxis": axis(
            "rank", range=[len(drawn) - 0.4, -0.6], fixedrange=True, showgrid=False,
            tickvals=list(range(len(drawn))), ticktext=[str(trace.rank) for trace in drawn],
        ),
    }  # fmt: skip
    ranks = tuple(trace.rank for trace in drawn)
    figure = {"data": data, "layout": layout, "height": _ROW_PX * len(drawn) + 90, "ranks": ranks}
    return Timeline(figure, ranks, steps, tuple(notes))


def _choose_ranks(capture: Capture) -> tuple[list[RankTrace], list[str]]:
    """Returns all ranks or, of many, those with the longest and shortest work and some of the others."""
    if len(capture.ranks) <= MAX_RANKS:
        return list(capture.ranks), []
    by_work = sorted(
        range(len(capture.ranks)), key=lambda index: _worked_s(capture.rank_means[index]), reverse=True
    )
    quarter = MAX_RANKS // 4
    chosen = {*by_work[:quarter], *by_work[-quarter:]}
    chosen |= {
        index for index, trace in enumerate(capture.ranks)
        if capture.straggler and trace.rank == capture.straggler.rank
    }  # fmt: skip
    others = [index for index in range(len(capture.ranks)) if index not in chosen]
    num = MAX_RANKS - len(chosen)
    chosen |= {others[number * len(others) // num] for number in range(num)}
    note = (
        f"{MAX_RANKS} of {len(capture.ranks)} ranks are shown: the {quarter} with the longest work per step, "
        f"the {quarter} with the shortest, and others at equal distances"
    )
    return [capture.ranks[index] for index in sorted(chosen)], [note]


def _worked_s(times: Times) -> float:
    return float(sum(getattr(times, part) for part in PARTS if part not in _WAITS))


def _bars(trace: RankTrace, row: int) -> Iterator[_Bar]:
    for span in trace.spans:
        if span.name in REGIONS:
            yield _Bar(span.name, row, span.start_s, span.dur_s, span.step, span.name)
    for one in trace.collectives:
        what = [plain(one.kind)]
        what += [format_bytes(one.bytes)] if one.bytes else []
        what += [f"{one.num_ranks} ranks"] if one.num_ranks else []
        yield _Bar("collective", row, one.start_s, one.dur_s, one.step, ", ".join(what))


def _trace(category: str, bars: Sequence[_Bar], zero_s: float) -> Figure:
    lane = _REGION_LANE if category in REGIONS else _COLLECTIVE_LANE
    # Many bars have the same text, so the page contains each text once, and its number for each bar.
    texts: dict[str, int] = {}
    return {
        "type": "bar",
        "orientation": "h",
        "name": category,
        "width": lane["width"],
        "base": [milliseconds(bar.start_s - zero_s) for bar in bars],
        "x": [milliseconds(bar.dur_s) for bar in bars],
        "y": [round(bar.row + lane["offset"], 2) for bar in bars],
        # Concurrent collectives overlap, so their bars are translucent.
        "marker": {
            "color": COLORS.get(category, COLORS["comm_exposed"]),
            "opacity": 1 if category in REGIONS else 0.6,
            "line": {"width": 0},
        },
        "meta": {
            "step": [bar.step for bar in bars],
            "what": [texts.setdefault(bar.what, len(texts)) for bar in bars],
            "texts": list(texts),
        },
    }


def _steps(drawn: Sequence[RankTrace], zero_s: float) -> _Steps:
    found: dict[int, tuple[float, float]] = {}
    for trace in drawn:
        for step in trace.steps:
            start_s, end_s = step.start_s - zero_s, step.start_s - zero_s + step.times.wall_s
            first, last = found.get(step.number, (start_s, end_s))
            found[step.number] = (min(first, start_s), max(last, end_s))
    return tuple(
        (number, milliseconds(first), milliseconds(last)) for number, (first, last) in sorted(found.items())
    )


def _mark(start: float) -> dict[str, Any]:
    return {
        "type": "line", "x0": start, "x1": start, "y0": 0, "y1": 1, "yref": "paper",
        "line": {"width": 1, "dash": "dot"},
    }  # fmt: skip


def _numbers(steps: _Steps, end: float) -> list[dict[str, Any]]:
    """Returns labels with the numbers of the steps, except those that would overlap on a phone."""
    numbers: list[dict[str, Any]] = []
    free = 0.0
    for number, start, _ in steps:
        if start >= free:
            numbers.append(
                {
                    "text": str(number) if numbers else f"step {number}", "x": start, "y": 1, "yref": "paper",
                    "xanchor": "left", "yanchor": "bottom", "showarrow": False,
                }
            )  # fmt: skip
            free = start + end * (0.07 if len(numbers) > 1 else 0.16)
    return numbers
