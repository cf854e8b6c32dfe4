"""Finds what slow steps have more of than other steps."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from ddp_hpc.trace.analysis_results import IDLE_CAUSES, PARTS, Times
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
CUT_OFF = 0.01
"""Fraction of the first step. If the device runs work from before the recording for longer at its start, the
step is too short for a comparison, since this time does not count."""


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


def slow_steps(recording: Recording, steps: Steps, tree: CallTree) -> tuple[SlowStep, ...]:
    """Returns the slow steps of a rank, the longest first."""
    lengths = {at: times.wall_s for at, times in enumerate(steps.times)}
    if (
        len(lengths) > 1
        and steps.device
        and steps.starts[0] > steps.on_host[0][0] + CUT_OFF * 1e9 * lengths[0]
    ):
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
