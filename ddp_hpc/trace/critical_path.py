"""Finds the critical path: the chain of kernels, collectives and waits that determined a step's length.

The path is followed backward from the end of the step. An event on a device is assumed to have waited for the
last event on the same device that finished before it. At a collective, the path continues on the rank that
started it last. The section of the path between two collectives, here called a link, depends on the events of
one rank only. Each process that reads a trace finds the links of one step, so that the events need not be
kept.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ddp_hpc.trace.analysis_results import CriticalPath, PathLink, PathLinks, PathPart, PathRow, RankTrace
from ddp_hpc.trace.intervals import Longs
from ddp_hpc.trace.match_collectives import Matched
from ddp_hpc.trace.step_times import DeviceActivity

COMPUTE, MEMCPY, COMMUNICATION, WAIT = "compute", "memcpy", "communication", "wait"

_MOST_EVENTS = 200_000
_MOST_COLLECTIVES = 2000
_MOST_VISITS = 300_000
"""Limits for one step of a rank. A step that exceeds them has no critical path."""
_MOST_PARTS = 500
_LEAST_NAMES = 8
"""A rank keeps about `_MOST_PARTS` names of kernels, but for each link at least `_LEAST_NAMES`."""
_MOST_OVERLAPS = 32
_REST = "other kernels"

_Spans: TypeAlias = tuple[list[int], list[int], list[int]]
"""Sorted starts and ends of intervals, and their total length up to each of them, which begins with 0."""

_REASONS = {"data": "for data", "snapshot": "for a snapshot"}
LATE, QUEUED, _UNKNOWN = "for a late launch", "to start, although queued", "for an unrecorded launch"
IN_CALL = "in the launch call"


@dataclass(frozen=True)
class StepEvents:
    """The events of a device in one step in the order of their ends, with times in nanoseconds."""

    begin: int
    end: int
    ran_dry: int
    """The end of the last event before the step."""
    starts: list[int]
    ends: list[int]
    moment: list[int]
    """The start of the call that launched each event."""
    returned: list[int]
    """The end of this call."""
    is_known: list[bool]
    """Whether this call was recorded."""
    region: list[str]
    """The region in which each event was launched; empty outside of all regions."""
    label: list[tuple[str, str]]
    """The kind and the name of each event."""
    collective: list[int]
    """The index of each event in the rank's list of collectives, or -1."""
    waited_for: dict[str, _Spans]
    """The times in which the host fetched data or saved a snapshot."""


def step_events(
    window: tuple[int, int],
    activity: DeviceActivity,
    labels: Sequence[tuple[str, str]],
    label: npt.NDArray[np.intc],
    collective: Longs,
) -> StepEvents | None:
    """Selects the events of one step; returns None if there are none or too many.

    Args:
        window: the start and the end of the step.
        activity: the events of the device.
        labels: pairs of kind and name.
        label: the index in `labels` for each event.
        collective: the index of each event in the rank's list of collectives, or -1.
    """
    begin, end = window
    starts, ends = activity.events
    # An event without a duration cannot have delayed another one.
    chosen = np.flatnonzero((ends > begin) & (ends <= end) & (ends > starts))
    if not 0 < len(chosen) <= _MOST_EVENTS or (collective[chosen] >= 0).sum() > _MOST_COLLECTIVES:
        return None
    chosen = chosen[np.argsort(ends[chosen], kind="stable")]
    return StepEvents(
        begin=begin,
        end=end,
        ran_dry=int(ends[ends <= begin].max(initial=np.iinfo(np.int64).min)),
        starts=np.maximum(starts[chosen], begin).tolist(),
        ends=ends[chosen].tolist(),
        moment=activity.launches.moment[chosen].tolist(),
        returned=activity.launches.returned[chosen].tolist(),
        is_known=activity.launches.is_known[chosen].tolist(),
        region=activity.region[chosen].tolist(),
        label=[labels[i] for i in label[chosen]],
        collective=collective[chosen].tolist(),
        waited_for={
            name: (starts.tolist(), ends.tolist(), np.append(0, np.cumsum(ends - starts)).tolist())
            for name, (starts, ends) in activity.waited_for.items()
        },
    )


def path_links(step: int, events: StepEvents) -> PathLinks | None:
    """Returns the links to the end of the step and to the start of each of its collectives."""
    finder = _Finder(events)
    try:
        end = finder.link(events.end, None)
        before = {
            collective: finder.link(events.starts[i], i)
            for i, collective in enumerate(events.collective)
            if collective >= 0
        }
    except _TooLongError:
        return None
    return PathLinks(step, end, before)


class _TooLongError(Exception):
    pass


class _Finder:
    def __init__(self, events: StepEvents) -> None:
        self._events = events
        self._num_visits = 0
        num_links = 1 + sum(collective >= 0 for collective in events.collective)
        self._most_names = max(_LEAST_NAMES, _MOST_PARTS // num_links)
        self._by_start = sorted(range(len(events.starts)), key=lambda i: events.starts[i])
        self._starts = [events.starts[i] for i in self._by_start]

    def link(self, moment: int, event: int | None) -> PathLink:
        """Follows the path backward from a moment to the end of a collective or the start of the step.

        `event` is the event that starts at the moment; None is the end of the step.
        """
        events = self._events
        times: defaultdict[tuple[str, str], int] = defaultdict(int)
        counts: Counter[tuple[str, str]] = Counter()
        previous = -1
        while moment > events.begin:
            self._num_visits += 1
            if self._num_visits > _MOST_VISITS:
                raise _TooLongError
            before = bisect_right(events.ends, moment) - 1
            finished = events.ends[before] if before >= 0 else events.begin
            is_late = self._is_late(event, finished if before >= 0 else events.ran_dry)
            running = self._running(moment, event) if finished < moment and not is_late else None
            if running is not None:
                begun = max(events.starts[running], finished)
                times[events.label[running]] += moment - begun
                counts[events.label[running]] += 1
                if begun > finished:
                    moment, event = begun, running
                    continue
            else:
                for reason, dur in self._waits(finished, moment, event):
                    if dur:
                        times[WAIT, reason] += dur
                        counts[WAIT, reason] += 1
            if before < 0 or (previous := events.collective[before]) >= 0:
                break
            times[events.label[before]] += finished - events.starts[before]
            counts[events.label[before]] += 1
            moment, event = events.starts[before], before
        return PathLink(previous, _parts(times, counts, self._most_names))

    def _is_late(self, event: int | None, finished: int) -> bool:
        """Returns whether the host launched the event only after the previous event had finished."""
        return event is None or self._events.moment[event] > finished

    def _running(self, moment: int, event: int | None) -> int | None:
        """Returns the kernel that started last of those that still run when the event starts, or None.

        Such a kernel let the event start early, as with programmatic dependent launch, or shares the device.
        """
        events = self._events
        at = bisect_left(self._starts, moment)
        for i in self._by_start[max(0, at - _MOST_OVERLAPS) : at][::-1]:
            if events.ends[i] > moment and i != event and events.label[i][0] == COMPUTE:
                return i
        return None

    def _waits(self, begin: int, end: int, event: int | None) -> Iterator[tuple[str, int]]:
        """Yields the reasons for waiting from `begin` to `end`, with times in nanoseconds."""
        events = self._events
        launched = returned = end
        region = ""
        if event is not None:
            if not events.is_known[event]:
                yield _UNKNOWN, end - begin
                return
            launched = min(max(events.moment[event], begin), end)
            returned = min(max(events.returned[event], begin), end)
            region = events.region[event]
        rest = launched - begin
        for name, spans in events.waited_for.items():
            waited = min(_covered(spans, launched) - _covered(spans, begin), rest)
            yield _REASONS[name], waited
            rest -= waited
        yield LATE + (f" ({region})" if region else ""), rest
        yield IN_CALL, returned - launched
        yield QUEUED, end - returned


def _covered(spans: _Spans, moment: int) -> int:
    """Returns how much of the time before the moment is inside the spans."""
    starts, ends, lengths = spans
    number = bisect_right(starts, moment)
    return lengths[number] - (max(0, ends[number - 1] - moment) if number else 0)


def _parts(
    times: dict[tuple[str, str], int], counts: dict[tuple[str, str], int], most_names: int
) -> tuple[PathPart, ...]:
    """Returns all waits, and the longest kernels and copies; all shorter ones are combined into one part."""
    ranked = sorted(times, key=lambda label: -times[label])
    rest = dict.fromkeys([label for label in ranked if label[0] != WAIT][most_names:])
    parts = [PathPart(*label, times[label] * 1e-9, counts[label]) for label in ranked if label not in rest]
    if rest:
        total_s = sum(times[label] for label in rest) * 1e-9
        parts.append(PathPart(COMPUTE, _REST, total_s, sum(counts[label] for label in rest)))
    return tuple(parts)


def critical_path(ranks: Sequence[RankTrace], matched: Sequence[Matched]) -> CriticalPath | None:
    """Returns the critical path of the step for which the ranks have links, or None without links.

    The path ends on the rank whose step ends last, and is not longer than this rank's step.
    """
    linked = {trace.rank: trace for trace in ranks if trace.path_links}
    if not linked:
        return None
    first = next(iter(linked.values())).path_links
    step = first.step if first else 0
    ends = {rank: _end_s(trace, step) for rank, trace in linked.items()}
    last_rank = max(ends, key=lambda rank: ends[rank])
    followed = list(_followed(linked, matched, step, last_rank))
    if not followed:
        return None
    rows: dict[tuple[int, str, str], PathRow] = {}
    for part in followed:
        key = part.rank, part.kind, part.name
        before = rows.get(key, replace(part, dur_s=0.0, count=0))
        rows[key] = replace(part, dur_s=before.dur_s + part.dur_s, count=before.count + part.count)
    begin_rank = followed[-1].rank
    begins = {rank: _begin_s(trace, step) for rank, trace in linked.items()}
    first_rank = min(begins, key=lambda rank: begins[rank])
    return CriticalPath(
        step=step,
        begin_rank=begin_rank,
        end_rank=last_rank,
        num_ranks=len({part.rank for part in followed}),
        first_rank=first_rank,
        late_s=begins[begin_rank] - begins[first_rank],
        rows=tuple(sorted(rows.values(), key=lambda row: -row.dur_s)),
    )


def _begin_s(trace: RankTrace, step: int) -> float:
    return next((own.start_s for own in trace.steps if own.number == step), math.inf)


def _end_s(trace: RankTrace, step: int) -> float:
    return next((own.start_s + own.times.wall_s for own in trace.steps if own.number == step), -math.inf)


def _followed(
    linked: dict[int, RankTrace], matched: Sequence[Matched], step: int, rank: int
) -> Iterator[PathRow]:
    """Yields the parts of the path, from its end to the start of the step on the rank on which it ends."""
    matched_by = {id(call): collective for collective in matched for call in collective.calls.values()}
    index = {id(call): i for trace in linked.values() for i, call in enumerate(trace.collectives)}
    seen: set[tuple[int, int]] = set()
    links = linked[rank].path_links
    link = links.end if links and links.step == step else None
    rest_s = next((own.times.wall_s for own in linked[rank].steps if own.number == step), 0.0)
    while link is not None:
        length_s = sum(part.dur_s for part in link.parts)
        # The order of the parts is not known, so if a link begins before the step, all of them are shortened.
        inside = min(1.0, rest_s / length_s) if length_s else 1.0
        for part in link.parts:
            yield PathRow(part.kind, part.name, part.dur_s * inside, part.count, rank)
        rest_s -= length_s
        at = link.previous
        if at < 0 or rest_s <= 0 or (rank, at) in seen:
            return
        seen.add((rank, at))
        call = linked[rank].collectives[at]
        dur_s = call.dur_s
        collective = matched_by.get(id(call))
        if collective is not None and collective.last != rank and collective.last in linked:
            # The transfer began when the last rank started the collective, so the path continues there.
            last = collective.calls[collective.last]
            there = linked[collective.last].path_links
            from_start_s = call.dur_s + call.start_s - last.start_s
            if there and there.step == step and index[id(last)] in there.before and from_start_s > 0:
                rank, at, dur_s = collective.last, index[id(last)], from_start_s
        yield PathRow(COMMUNICATION, call.kind, min(dur_s, rest_s), 1, rank)
        rest_s -= dur_s
        here = linked[rank].path_links
        link = here.before.get(at) if here and rest_s > 0 else None
