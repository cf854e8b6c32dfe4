"""The timeline of the page: lanes with the regions, the collectives and the device of each rank."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from ddp_hpc.base.text_table import cut
from ddp_hpc.base.units import duration, format_bytes
from ddp_hpc.trace.analysis_results import REGIONS, Capture, Collective, RankTrace, Step
from ddp_hpc.trace.event_columns import Numbers
from ddp_hpc.trace.event_names import region_of_event, shortened
from ddp_hpc.trace.html_figures import COLORS, MAX_NAME, Figure, axis, base_layout, milliseconds, plain
from ddp_hpc.trace.kernel_kinds import KINDS
from ddp_hpc.trace.match_collectives import Matched, match
from ddp_hpc.trace.named_results import ANNOTATION, BLOCKING, CALL, OPERATOR, PYTHON, NamedEvent

_Steps: TypeAlias = tuple[tuple[int, float, float, float, float], ...]

MAX_RANKS = 32
MAX_BARS = 80_000
_LABELED_RANKS = 8
"""With more ranks, the lanes are thinner and only the ranks have labels."""
_SAME_S = 1e-6
"""Bars can overlap by this time, which is more than the rounding errors of seconds since 1970."""
_LANE_PX, _THIN_LANE_PX = 20, 11
_PANEL_PX = 90
_CHARACTER_PX = 6
"""About the mean width of the characters in labels."""
_MAX_POINTS = 8_000
_BUSY = "device busy"
_BUSY_COLOR = "#6e7781"
_COLLECTIVE = "collective"
_MORE_CALLS = 2
"""The number of levels of Python calls beyond those of operators."""
_KINDS = (*REGIONS, _COLLECTIVE, _BUSY, ANNOTATION, PYTHON, OPERATOR, CALL, BLOCKING, *KINDS)
"""The kinds of bars."""


@dataclass(frozen=True)
class Lane:
    """One of the lanes in the row of each rank."""

    title: str
    """What the lane shows, and whether the times are those of the host or of the device."""
    categories: tuple[str, ...]
    num_levels: int = 1
    """The height of the lane, in which bars are below those that they overlap, such as their callers."""


@dataclass(frozen=True)
class Timeline:
    """The timeline of a capture, and notes on what it omits."""

    figure: Figure
    lanes: tuple[Lane, ...]
    """The lanes of each rank, from top to bottom."""
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Bar:
    event: NamedEvent
    row: int
    level: int
    step: int | None


@dataclass(frozen=True)
class _Line:
    """A quantity over time, in one of the panels below the lanes."""

    panel: str
    text: str
    moments: Sequence[float]
    values: Sequence[float]
    dash: str = "solid"


def timeline(capture: Capture, max_bars: int = MAX_BARS) -> Timeline:
    """Returns a timeline of at most `MAX_RANKS` ranks with the `max_bars` longest bars."""
    drawn, notes = _choose_ranks(capture)
    num_levels = 4 if len(drawn) <= 2 else 3 if len(drawn) <= _LABELED_RANKS else 1
    matched = {id(call): one for one in match(capture.ranks) for call in one.calls.values()}
    lanes = _lanes(capture)
    rows = (_bars(trace, row, num_levels, lanes, matched) for row, trace in enumerate(drawn))
    all_bars = [bar for row in rows for bar in row]
    bars = heapq.nlargest(max_bars, all_bars, key=lambda bar: bar.event.dur_s)
    if num_omitted := len(all_bars) - len(bars):
        notes.append(f"The {num_omitted:,} shortest of {len(all_bars):,} bars are not shown")
    begins = [bar.event.start_s for bar in bars] + [step.start_s for trace in drawn for step in trace.steps]
    zero_s = min(begins, default=0.0)
    steps = _steps(drawn, zero_s) if capture.has_steps else ()
    ends = [bar.event.start_s + bar.event.dur_s - zero_s for bar in bars]
    end = max([milliseconds(max(ends, default=0.0)), *(end for *_, end in steps), 1.0])
    levels = [(lane, {bar.level for bar in bars if bar.event.kind in lane.categories}) for lane in lanes]
    lanes = tuple(replace(lane, num_levels=1 + max(own)) for lane, own in levels if own) or lanes[:1]
    data = [
        _trace(kind, lanes, some, zero_s)
        for kind in _KINDS
        if (some := [bar for bar in bars if bar.event.kind == kind])
    ]
    lane_px = _LANE_PX if len(drawn) <= _LABELED_RANKS else _THIN_LANE_PX
    lanes_px = (lane_px * _num_units(lanes) + 8) * len(drawn)
    lines = [*_memory(drawn), *_queue(drawn)]
    panels = list(dict.fromkeys(line.panel for line in lines))
    height = lanes_px + len(panels) * _PANEL_PX
    data += [_drawn(line, panels.index(line.panel) + 2, zero_s, _MAX_POINTS // len(lines)) for line in lines]
    labels = _labels(drawn, lanes)
    layout = base_layout() | {
        "margin": {"l": 26 + _CHARACTER_PX * max(map(len, labels["ticktext"])), "r": 12, "t": 28, "b": 56},
        "barmode": "overlay",
        "dragmode": "zoom",
        "hoverlabel": {"align": "left"},
        "xaxis": axis("milliseconds", range=[0, end], showgrid=False, anchor=f"y{len(panels) + 1}"),
        "yaxis": axis(
            range=[len(drawn) - 0.45, -0.55], fixedrange=True, showgrid=False,
            domain=[1 - lanes_px / height, 1], **labels,
        ),
    }  # fmt: skip
    for number, panel in enumerate(panels):
        top = len(panels) - number
        domain = [(top - 1) * _PANEL_PX / height, (top - 0.25) * _PANEL_PX / height]
        layout[f"yaxis{number + 2}"] = axis(
            panel, domain=domain, fixedrange=True, rangemode="tozero", nticks=4
        )
    ranks = [trace.rank for trace in drawn]
    num_named = sum(bar.event.kind not in (*REGIONS, _BUSY) for bar in bars)
    figure = {"data": data, "layout": layout, "height": height + 90, "ranks": ranks, "steps": steps}
    figure["numbers"] = num_named, sum(trace.num_events for trace in drawn)
    return Timeline(figure, lanes, tuple(notes))


def _memory(drawn: Sequence[RankTrace]) -> Iterator[_Line]:
    """Yields the lines of the devices, without the host if a rank has another device."""
    for trace in drawn:
        for memory in trace.memory:
            moments, *both = memory.curve
            for text, values, dash in zip(("allocated", "reserved"), both, ("solid", "dot"), strict=True):
                if any(values) and (memory.device != "cpu" or not trace.busy):
                    of = f"{text}, rank {trace.rank}, {plain(memory.device)}"
                    yield _Line("memory, GiB", of, moments, [value / 2**30 for value in values], dash)


def _queue(drawn: Sequence[RankTrace]) -> Iterator[_Line]:
    for trace in drawn:
        if trace.queue:
            moments, lengths = trace.queue
            yield _Line("queue", f"in the queue, rank {trace.rank}", moments, lengths)


def _drawn(line: _Line, axis: int, zero_s: float, most: int) -> Figure:
    every = -(-len(line.moments) // most)
    pieces = (range(len(line.values))[at : at + every] for at in range(0, len(line.values), every))
    kept = [max(piece, key=line.values.__getitem__) for piece in pieces]  # the largest of neighboring values
    return {
        "type": "scatter",
        "mode": "lines",
        "name": line.panel,
        "x": [milliseconds(line.moments[at] - zero_s) for at in kept],
        "y": [round(line.values[at], 3) for at in kept],
        "yaxis": f"y{axis}",
        "line": {"shape": "hv", "width": 1.5, "dash": line.dash, "color": COLORS["backward"]},
        "text": line.text,
        "hovertemplate": "%{y:,} %{text}<br>at %{x:,.3~f} ms<extra></extra>",
    }


def _lanes(capture: Capture) -> tuple[Lane, ...]:
    kinds = ((ANNOTATION,), (PYTHON,), (OPERATOR,), (CALL, BLOCKING))
    named = [Lane(f"host: {categories[0]}s", categories) for categories in kinds]
    if capture.on_device:
        return (
            Lane("host: data", ("data",)),
            *named,
            Lane("device: regions", tuple(region for region in REGIONS if region != "data")),
            Lane("device: kernels", KINDS),
            Lane("device: collectives", (_COLLECTIVE,)),
            Lane("device: busy", (_BUSY,)),
        )
    return (Lane("host: regions", REGIONS), Lane("host: collectives", (_COLLECTIVE,)), *named)


def _num_units(lanes: Sequence[Lane]) -> int:
    return sum(lane.num_levels for lane in lanes)


def _offset(lanes: Sequence[Lane], number: int, level: float) -> float:
    """Returns the position of a level of a lane relative to the middle of its row, whose height is 1."""
    return (_num_units(lanes[:number]) + level + 0.5) / _num_units(lanes) * 0.9 - 0.45


def _labels(drawn: Sequence[RankTrace], lanes: Sequence[Lane]) -> dict[str, Any]:
    """Returns the labels of the lanes; if there are many ranks, only the labels of the rows."""
    if len(drawn) > _LABELED_RANKS:
        labels = {float(row): f"rank {trace.rank}" for row, trace in enumerate(drawn)}
    else:
        labels = {
            row + _offset(lanes, i, (lane.num_levels - 1) / 2): f"rank {trace.rank}, " * (not i) + lane.title
            for row, trace in enumerate(drawn)
            for i, lane in enumerate(lanes)
        }
    return {"tickvals": [*labels], "ticktext": [*labels.values()]}


def _choose_ranks(capture: Capture) -> tuple[list[RankTrace], list[str]]:
    """Returns all ranks; of many, the one that the others wait for, and some from the longest to the shortest
    work.
    """
    if len(capture.ranks) <= MAX_RANKS:
        return list(capture.ranks), []
    pairs = zip(capture.ranks, capture.rank_means, strict=True)
    work_s = {trace.rank: mean.own_s - mean.idle_s for trace, mean in pairs}
    by_work = sorted(work_s, key=lambda rank: -work_s[rank])
    last = MAX_RANKS - 2
    chosen = {by_work[number * (len(by_work) - 1) // last] for number in range(last + 1)}
    chosen |= {capture.straggler.rank} if capture.straggler else set()
    note = (
        f"{len(chosen)} of {len(work_s)} ranks are shown, from the one with the longest work per step to the "
        "one with the shortest"
    )
    return [trace for trace in capture.ranks if trace.rank in chosen], [note]


def _bars(
    trace: RankTrace, row: int, num_levels: int, lanes: Sequence[Lane], matched: dict[int, Matched]
) -> Iterator[_Bar]:
    busy = (
        NamedEvent(_BUSY, _BUSY, start_s, end_s - start_s, share=share)
        for start_s, end_s, share in trace.busy
    )
    calls = (_collective(call, trace.rank, matched.get(id(call))) for call in trace.collectives)
    of_kind: defaultdict[str, list[NamedEvent]] = defaultdict(list)
    for event in (*trace.named, *calls, *busy):
        # On a host without a device, regions have a lane of their own.
        if event.kind != ANNOTATION or trace.busy or not region_of_event(ANNOTATION, event.name):
            of_kind[event.kind].append(event)
    for lane in lanes:
        most = num_levels + _MORE_CALLS * (lane.categories == (PYTHON,))
        events = [event for kind in lane.categories for event in of_kind[kind]]
        events.sort(key=lambda event: (event.start_s, -event.dur_s))
        for event, level in zip(events, _levels(events), strict=True):
            if level < most or lane.categories != (OPERATOR,):
                # Deeper operators are omitted, because they would hide those that called them.
                step = trace.step_at(event.start_s, lane.title.startswith("host"))
                yield _Bar(event, row, min(level, most - 1), step)


def _levels(events: Sequence[NamedEvent]) -> Iterator[int]:
    """Yields the level of each event, which are sorted by start: the first one that is free."""
    ends: list[float] = []
    for event in events:
        level = next((at for at, end_s in enumerate(ends) if end_s <= event.start_s + _SAME_S), len(ends))
        ends[level : level + 1] = [event.start_s + event.dur_s]
        yield level


def _collective(call: Collective, rank: int, same: Matched | None) -> NamedEvent:
    what = [cut(call.kind, 60)]
    what += [format_bytes(call.bytes)] if call.bytes else []
    what += [f"{call.num_ranks} ranks"] if call.num_ranks else []
    if same:
        waited = f"{duration(call.dur_s - same.transfer_s)} of it waiting for rank {same.last}"
        what += [waited if rank != same.last else "last to start"]
    what += [shortened(call.kernel, MAX_NAME)] if call.kernel else []
    launched_s = call.start_s - call.queued_s
    return NamedEvent(_COLLECTIVE, ", ".join(what), call.start_s, call.dur_s, call.callers, launched_s)


def _trace(kind: str, lanes: Sequence[Lane], bars: Sequence[_Bar], zero_s: float) -> Figure:
    number = next(i for i, lane in enumerate(lanes) if kind in lane.categories)
    events = [bar.event for bar in bars]
    # Many bars have the same text, so the page contains each text once, and its number for each bar.
    texts: Numbers[str] = Numbers()
    # Those of collectives contain the shortened name of the kernel, which a search must find whole.
    names = [event.name if kind == _COLLECTIVE else shortened(event.name, MAX_NAME) for event in events]
    named: dict[str, Any] = {}
    is_launched = kind in KINDS or any(event.callers for event in events if kind == _COLLECTIVE)
    if is_launched or kind in (CALL, BLOCKING):
        named["callers"] = [texts[event.callers[-MAX_NAME:]] for event in events]
    if any(event.details for event in events):
        named["details"] = [texts[event.details] for event in events]
    if kind == _BUSY:
        named["share"] = [round(event.share, 3) for event in events]
    if is_launched:
        moments = (event.launched_s for event in events)
        named["launched"] = [None if math.isinf(at) else milliseconds(at - zero_s) for at in moments]
    return {
        "type": "bar",
        "orientation": "h",
        "name": kind,
        "width": 0.72 / _num_units(lanes),
        "base": [milliseconds(event.start_s - zero_s) for event in events],
        "x": [milliseconds(event.dur_s) for event in events],
        "y": [round(bar.row + _offset(lanes, number, bar.level), 3) for bar in bars],
        "marker": {
            "color": COLORS["comm_hidden"] if kind == _COLLECTIVE else COLORS.get(kind, _BUSY_COLOR),
            "line": {"width": 0.7 if kind in (ANNOTATION, CALL, BLOCKING) else 0, "color": "#ffffff"},
        },
        "meta": {
            "step": [bar.step for bar in bars],
            "what": [texts[name] for name in names],
            "texts": list(texts),
            "lane": lanes[number].title,
            **named,
        },
    }


def _steps(drawn: Sequence[RankTrace], zero_s: float) -> _Steps:
    """Returns number, start and end of each step in milliseconds, over all ranks, and the start and the end
    that include the step on the host.
    """
    found: defaultdict[int, list[Step]] = defaultdict(list)
    for trace in drawn:
        for step in trace.steps:
            found[step.number].append(step)
    return tuple((number, *_limits(found[number], zero_s)) for number in sorted(found))


def _limits(steps: Sequence[Step], zero_s: float) -> tuple[float, float, float, float]:
    first, last = min(step.start_s for step in steps), max(step.end_s for step in steps)
    on_host = [moment_s for step in steps for moment_s in step.limits_s(on_host=True)]
    limits = first, last, min(first, *on_host), max(last, *on_host)
    first, last, begin, end = (milliseconds(moment_s - zero_s) for moment_s in limits)
    return first, last, begin, end
