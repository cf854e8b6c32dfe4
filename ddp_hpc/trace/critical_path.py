"""Finds the critical path: the chain of kernels, collectives and waits that determined a step's length.

The path is followed backward from the end of the step. An event on a device is assumed to have waited for the
last event on the same device that finished before it. At a collective, the path continues on the rank that
started it last. The section of the path between two collectives, here called a link, depends on the events of
one rank only. Each process that reads a trace finds the links of one step, so that the events need not be
kept.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np

from ddp_hpc.trace.analysis_results import (
    Collective,
    CriticalPath,
    PathLink,
    PathLinks,
    PathPart,
    RankTrace,
)
from ddp_hpc.trace.event_columns import Events
from ddp_hpc.trace.event_names import kernel_kind
from ddp_hpc.trace.events_by_kind import Recording
from ddp_hpc.trace.intervals import Intervals, Longs
from ddp_hpc.trace.match_collectives import Matched
from ddp_hpc.trace.step_times import DeviceActivity, Steps

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
LATE, QUEUED, _UNKNOWN = "for a late launch", "(kernel queued)", "for an unrecorded launch"
IN_CALL = "in the launch call"


def path_links(recording: Recording, activity: DeviceActivity, steps: Steps) -> PathLinks | None:
    """Returns the links to the end of the middle step and to the start of each of its collectives, since the
    first and the last step are often unusual. Returns None if the step contains no events or too many.
    """
    device, middle = recording.device, len(steps.numbers) // 2
    begin, end = int(steps.starts[middle]), int(steps.ends[middle])
    # An event without a duration cannot have delayed another one.
    chosen = np.flatnonzero((device.ends > begin) & (device.ends <= end) & (device.ends > device.starts))
    collective = _collective_index(recording)
    num_links = 1 + int((collective[chosen] >= 0).sum())
    if not 0 < len(chosen) <= _MOST_EVENTS or num_links > 1 + _MOST_COLLECTIVES:
        return None
    chosen = chosen[np.argsort(device.ends[chosen], kind="stable")]
    finder = _Finder(device, activity, begin, chosen, collective[chosen])
    most_names = max(_LEAST_NAMES, _MOST_PARTS // num_links)
    try:
        return PathLinks(
            step=steps.numbers[middle],
            end=finder.link(end, None, most_names),
            before={
                number: finder.link(finder.starts[i], i, most_names)
                for i, number in enumerate(finder.collective)
                if number >= 0
            },
        )
    except _TooLongError:
        return None


def _collective_index(recording: Recording) -> Longs:
    """Returns the index of each event in the rank's list of collectives, which is sorted by start, or -1."""
    index = np.full(len(recording.device), -1, np.int64)
    members = np.flatnonzero(recording.is_collective)
    index[members[np.argsort(recording.device.starts[members], kind="stable")]] = np.arange(len(members))
    return index


def _label(category: str, name: str) -> tuple[str, str]:
    if category == "kernel" and (collective := kernel_kind(name)):
        return COMMUNICATION, collective
    return (MEMCPY if category in ("gpu_memcpy", "gpu_memset") else COMPUTE), name


class _TooLongError(Exception):
    pass


class _Finder:
    """Finds links among the chosen events of one step, which are in the order of their ends."""

    def __init__(
        self, device: Events, activity: DeviceActivity, begin: int, chosen: Longs, collective: Longs
    ) -> None:
        launches = activity.launches
        labels = [_label(*pair) for pair in device.names]
        self._begin = begin
        # The end of the last event before the step.
        self._ran_dry = int(device.ends[device.ends <= begin].max(initial=np.iinfo(np.int64).min))
        # Lists, since access to single elements of arrays is slow.
        self.starts: list[int] = np.maximum(device.starts[chosen], begin).tolist()
        self._ends: list[int] = device.ends[chosen].tolist()
        self._launched: list[int] = launches.moment[chosen].tolist()
        self._returned: list[int] = launches.returned[chosen].tolist()
        self._is_known: list[bool] = launches.is_known[chosen].tolist()
        self._region: list[str] = activity.region[chosen].tolist()
        self._label = [labels[number] for number in device.name[chosen]]
        self.collective: list[int] = collective.tolist()
        self._waited_for = {name: _spans(intervals) for name, intervals in activity.waited_for.items()}
        self._by_start = sorted(range(len(chosen)), key=lambda i: self.starts[i])
        self._sorted_starts = [self.starts[i] for i in self._by_start]
        self._num_visits = 0

    def link(self, moment: int, event: int | None, most_names: int) -> PathLink:
        """Follows the path backward from a moment to the end of a collective or the start of the step.

        `event` is the event that starts at the moment; None is the end of the step.
        """
        times: defaultdict[tuple[str, str], int] = defaultdict(int)
        counts: Counter[tuple[str, str]] = Counter()
        previous = -1
        while moment > self._begin:
            self._num_visits += 1
            if self._num_visits > _MOST_VISITS:
                raise _TooLongError
            before = bisect_right(self._ends, moment) - 1
            finished = self._ends[before] if before >= 0 else self._begin
            # Whether the host launched the event only after the previous event had finished.
            is_late = event is None or self._launched[event] > (finished if before >= 0 else self._ran_dry)
            running = self._running(moment, event) if finished < moment and not is_late else None
            if running is not None:
                begun = max(self.starts[running], finished)
                times[self._label[running]] += moment - begun
                counts[self._label[running]] += 1
                if begun > finished:
                    moment, event = begun, running
                    continue
            else:
                for reason, dur in self._waits(finished, moment, event):
                    if dur:
                        times[WAIT, reason] += dur
                        counts[WAIT, reason] += 1
            if before < 0 or (previous := self.collective[before]) >= 0:
                break
            times[self._label[before]] += finished - self.starts[before]
            counts[self._label[before]] += 1
            moment, event = self.starts[before], before
        return PathLink(previous, _parts(times, counts, most_names))

    def _running(self, moment: int, event: int | None) -> int | None:
        """Returns the kernel that started last of those that still run when the event starts, or None.

        Such a kernel let the event start early, as with programmatic dependent launch, or shares the device.
        """
        at = bisect_left(self._sorted_starts, moment)
        for i in self._by_start[max(0, at - _MOST_OVERLAPS) : at][::-1]:
            if self._ends[i] > moment and i != event and self._label[i][0] == COMPUTE:
                return i
        return None

    def _waits(self, begin: int, end: int, event: int | None) -> Iterator[tuple[str, int]]:
        """Yields the reasons for waiting from `begin` to `end`, with times in nanoseconds."""
        launched = returned = end
        region = ""
        if event is not None:
            if not self._is_known[event]:
                yield _UNKNOWN, end - begin
                return
            launched = min(max(self._launched[event], begin), end)
            returned = min(max(self._returned[event], begin), end)
            region = self._region[event]
        rest = launched - begin
        for name, spans in self._waited_for.items():
            waited = min(_covered(spans, launched) - _covered(spans, begin), rest)
            yield _REASONS[name], waited
            rest -= waited
        yield LATE + (f" ({region})" if region else ""), rest
        yield IN_CALL, returned - launched
        yield QUEUED, end - returned


def _spans(intervals: Intervals) -> _Spans:
    starts, ends = intervals
    return starts.tolist(), ends.tolist(), np.append(0, np.cumsum(ends - starts)).tolist()


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
    links = {trace.rank: trace.path_links for trace in ranks if trace.path_links}
    if not links:
        return None
    number = next(iter(links.values())).step
    links = {rank: own for rank, own in links.items() if own.step == number}
    steps = {trace.rank: step for trace in ranks for step in trace.steps if step.number == number}
    end_rank = max(links, key=lambda rank: steps[rank].end_s)
    collectives = {trace.rank: trace.collectives for trace in ranks}
    followed = list(_followed(links, collectives, matched, end_rank, steps[end_rank].times.wall_s))
    if not followed:
        return None
    rows: dict[tuple[int, str, str], PathPart] = {}
    for part in followed:
        key = part.rank, part.kind, part.name
        before = rows.get(key, replace(part, dur_s=0.0, count=0))
        rows[key] = replace(part, dur_s=before.dur_s + part.dur_s, count=before.count + part.count)
    return CriticalPath(
        step=number,
        begin_rank=followed[-1].rank,
        end_rank=end_rank,
        rows=tuple(sorted(rows.values(), key=lambda row: -row.dur_s)),
    )


def _followed(
    links: dict[int, PathLinks],
    collectives: dict[int, tuple[Collective, ...]],
    matched: Sequence[Matched],
    rank: int,
    rest_s: float,
) -> Iterator[PathPart]:
    """Yields the parts of the path, from its end to the start of the step on the rank on which it ends.

    `rest_s` is the length of this rank's step.
    """
    matched_by = {id(call): collective for collective in matched for call in collective.calls.values()}
    index = {id(call): i for rank in links for i, call in enumerate(collectives[rank])}
    seen: set[tuple[int, int]] = set()
    link: PathLink | None = links[rank].end
    while link is not None:
        length_s = sum(part.dur_s for part in link.parts)
        # The order of the parts is not known, so if a link begins before the step, all of them are shortened.
        inside = min(1.0, rest_s / length_s) if length_s else 1.0
        for part in link.parts:
            yield replace(part, dur_s=part.dur_s * inside, rank=rank)
        rest_s -= length_s
        at = link.previous
        if at < 0 or rest_s <= 0 or (rank, at) in seen:
            return
        seen.add((rank, at))
        call = collectives[rank][at]
        dur_s = call.dur_s
        collective = matched_by.get(id(call))
        if collective is not None and collective.last != rank and collective.last in links:
            # The transfer began when the last rank started the collective, so the path continues there.
            last = collective.calls[collective.last]
            from_start_s = call.dur_s + call.start_s - last.start_s
            if index[id(last)] in links[collective.last].before and from_start_s > 0:
                rank, at, dur_s = collective.last, index[id(last)], from_start_s
        yield PathPart(COMMUNICATION, call.kind, min(dur_s, rest_s), 1, rank)
        rest_s -= dur_s
        link = links[rank].before.get(at) if rest_s > 0 else None
