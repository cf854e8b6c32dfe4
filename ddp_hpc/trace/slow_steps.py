"""Finds what slow steps have more of than other steps."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ddp_hpc.trace.analysis_results import IDLE_CAUSES, PARTS, RankTrace, Times
from ddp_hpc.trace.event_columns import Events
from ddp_hpc.trace.event_names import ALL_STEPS, STEP
from ddp_hpc.trace.events_by_kind import Recording
from ddp_hpc.trace.intervals import Longs, index_at
from ddp_hpc.trace.named_events import CallTree
from ddp_hpc.trace.named_results import SlowStep
from ddp_hpc.trace.step_times import Steps

_LONGER = 1.1
"""Ratio to the median above which a step is slow."""
_LEAST = 0.1
"""Fraction of the difference that a call or kernel must have to be named."""
_MOST_STEPS = 20
_SHIFTED = 0.01
"""Fraction of the first step by which it may begin earlier or later than the others for a comparison."""


def shifted_steps(ranks: Sequence[RankTrace]) -> set[int]:
    """Returns the first step of the ranks if it cannot be compared with the others."""
    found, begins = set(), min(trace.steps[0].number for trace in ranks)
    for trace in ranks:
        first, lags_s = trace.steps[0], [step.start_s - step.limits_s(True)[0] for step in trace.steps]
        if first.number == begins and trace.busy and _is_shifted(lags_s, first.times.wall_s):
            found.add(first.number)
    return found


def _is_shifted(lags_s: Sequence[float], first_s: float) -> bool:
    """Returns whether the first step begins earlier or later than the others. `lags_s` is how much later each
    step begins on the device than on the host: when the device has finished the step before. At the start of
    the recording, it can be idle, or run work from before, for longer.
    """
    return len(lags_s) > 1 and abs(lags_s[0] - statistics.median(lags_s[1:])) > _SHIFTED * first_s


def slow_among(lengths: Mapping[int, float]) -> list[int]:
    """Returns the steps that are more than 10 % longer than the median, the longest first. If there are none,
    the comparison is with the shortest step.
    """
    for usual in (statistics.median_low(lengths.values()), min(lengths.values())):
        if slow := [number for number, length in lengths.items() if length > _LONGER * usual]:
            return sorted(slow, key=lambda number: -lengths[number])
    return []


def differences(slow: Sequence[Times], others: Sequence[Times]) -> dict[str, float]:
    """Returns how much longer each part of a step is in the slow steps (means); the largest first. The idle
    time of a device is divided by cause.
    """
    causes = [cause for cause in IDLE_CAUSES if cause.removeprefix("idle_") not in PARTS]
    on_device = any(getattr(times, cause) for times in (*slow, *others) for cause in causes)
    parts = [*(part for part in PARTS if not (on_device and part == "idle_s")), *causes]
    more = {
        part: statistics.fmean(getattr(times, part) for times in slow)
        - statistics.fmean(getattr(times, part) for times in others)
        for part in parts
    }
    return dict(sorted(more.items(), key=lambda item: -item[1]))


def mean_lengths(ranks: Sequence[RankTrace]) -> dict[int, float]:
    """Returns the length of each step by its number, the mean over the ranks."""
    return {number: statistics.fmean(of.wall_s for of in own) for number, own in _by_number(ranks).items()}


def _by_number(ranks: Sequence[RankTrace]) -> dict[int, list[Times]]:
    times: defaultdict[int, list[Times]] = defaultdict(list)
    for step in (step for trace in ranks for step in trace.steps):
        times[step.number].append(step.times)
    return times


@dataclass(frozen=True)
class SlowSteps:
    """The slow steps of a run, and how they differ from the other steps."""

    lengths: Mapping[int, float]
    """By number, the mean over the ranks."""
    more: Mapping[str, float]
    """How much longer each part is, by field of Times; the largest first."""
    most: Mapping[int, tuple[str, float]]
    """The part with the largest difference in each step, and this difference."""
    usual_s: float
    """The median of the other steps."""
    gain: float
    """The fraction of the mean step that is gained if the slow steps took this."""


def slow_steps_of(ranks: Sequence[RankTrace]) -> SlowSteps | None:
    """Returns the slow steps of a run; None if there are none."""
    times, shifted = _by_number(ranks), shifted_steps(ranks)
    lengths = {number: length for number, length in mean_lengths(ranks).items() if number not in shifted}
    slow = {number: lengths[number] for number in (slow_among(lengths) if lengths else ())}
    if not slow:
        return None
    usual = [each for number in lengths if number not in slow for each in times[number]]
    usual_s = statistics.median(length for number, length in lengths.items() if number not in slow)
    all_s = sum(each.wall_s for own in times.values() for each in own) / len(ranks)
    most = {number: next(iter(differences(times[number], usual).items())) for number in slow}
    return SlowSteps(
        lengths=slow,
        more=differences([each for number in slow for each in times[number]], usual),
        most=most,
        usual_s=usual_s,
        gain=sum(length - usual_s for length in slow.values()) / (all_s or 1.0),
    )


def slow_steps(recording: Recording, steps: Steps, tree: CallTree) -> tuple[SlowStep, ...]:
    """Returns the slow steps of a rank, the longest first."""
    lengths = {at: times.wall_s for at, times in enumerate(steps.times)}
    if steps.device and _is_shifted(((steps.starts - steps.on_host[0]) * 1e-9).tolist(), lengths[0]):
        del lengths[0]
    slow = slow_among(lengths) if lengths else []
    if not slow:
        return ()
    others = [at for at in lengths if at not in slow]
    usual_s = statistics.fmean(lengths[at] for at in others)
    host, calls, caller = recording.host, recording.launches, tree.caller
    outer = np.where(tree.is_nested, 0, calls.durations)
    own, inner, called = host.durations.copy(), tree.above >= 0, caller >= 0
    np.subtract.at(own, tree.above[inner], host.durations[inner])
    np.subtract.at(own, caller[called], outer[called])
    found = []
    for at in slow[:_MOST_STEPS]:
        more = differences([steps.times[at]], [steps.times[one] for one in others])
        part, part_s = next(iter(more.items()))
        excess_s = lengths[at] - usual_s

        def most(
            events: Events, durations: Longs, moments: Longs, at: int = at, least_s: float = _LEAST * excess_s
        ) -> tuple[float, str]:
            longest = _most(events, durations, index_at(steps.on_host, moments), at, others)
            return longest if longest[0] >= least_s else (0.0, "")

        call_s, call = max(most(host, own, host.starts), most(calls, outer, calls.starts))
        kernel_s, kernel = 0.0, ""
        if device := steps.device:
            kernel_s, kernel = most(recording.device, recording.device.durations, device.launches.moment)
        found.append(
            SlowStep(steps.numbers[at], lengths[at], excess_s, part, part_s, call, call_s, kernel, kernel_s)
        )
    return tuple(found)


def _most(
    events: Events, durations: Longs, step: Longs, slow: int, others: Sequence[int]
) -> tuple[float, str]:
    """Returns the largest difference of the time of a name in a step to the mean of others, and the name."""
    size = len(events.names)
    usual = np.isin(step, others)
    of_slow = np.bincount(events.name[step == slow], durations[step == slow], size)
    more = of_slow - np.bincount(events.name[usual], durations[usual], size) / len(others)
    of: defaultdict[str, float] = defaultdict(float)
    for (_, name), more_ns in zip(events.names, more.tolist(), strict=True):
        of[ALL_STEPS if name.startswith(STEP) else name] += more_ns * 1e-9
    return max(((more_s, name) for name, more_s in of.items()), default=(0.0, ""))
