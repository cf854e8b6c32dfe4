"""Combines the traces of all ranks of a run: mean times, the straggler, and the main findings."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ddp_hpc.base.units import duration
from ddp_hpc.trace.analysis_results import (
    REGIONS,
    TIMES,
    Capture,
    CollectiveRow,
    RankTrace,
    Straggler,
    Times,
)
from ddp_hpc.trace.critical_path import critical_path
from ddp_hpc.trace.findings import findings
from ddp_hpc.trace.match_collectives import LEAST_CLOCK_S, Matched, aligned, match, rows
from ddp_hpc.trace.slow_connection import slow_connection
from ddp_hpc.trace.slow_steps import shifted_steps
from ddp_hpc.trace.trace_files import first_of, read_ranks

_SLOW = 0.05
"""Fraction of a step by which a rank must be slower than the others to be reported."""
_LITTLE = 0.01
"""Fraction of a step below which a delay is not mentioned."""
_MOST_FOLLOWING = 2
_LATE = 0.6
"""Fraction of the waiting in collectives that one rank must cause to be named as late."""


def read_captures(directories: Sequence[Path], num_processes: int | None) -> list[Capture]:
    """Reads the capture in each directory, as `read_capture` does."""
    names = [directory.name or directory.resolve().name for directory in directories]
    return [
        read_capture(directory, name if names.count(name) == 1 else str(directory), num_processes)
        for name, directory in zip(names, directories, strict=True)
    ]


def read_capture(path: Path, name: str | None = None, num_processes: int | None = None) -> Capture:
    """Reads the traces in a directory, with a progress bar on a terminal.

    Raises:
        RequestError: there are no traces, or none of them can be used.
        DdpHpcError: a file cannot be read.
    """
    read, notes, warnings = read_ranks(path, num_processes)
    ranks, moved = aligned(read)
    capture = capture_of(name or path.resolve().name, ranks, (*notes, *moved))
    return replace(capture, warnings=tuple(warnings))


def capture_of(name: str, ranks: Sequence[RankTrace], notes: Sequence[str] = ()) -> Capture:
    """Combines the ranks of one run."""
    world_size = max(ranks[0].world_size, ranks[-1].rank + 1)
    missing = tuple(sorted(set(range(world_size)) - {trace.rank for trace in ranks}))
    matched = match(ranks)
    means = tuple(mean([step.times for step in trace.steps]) for trace in ranks)
    overall = mean([step.times for trace in ranks for step in trace.steps])
    collectives = rows(ranks, matched)
    connection = slow_connection(ranks, matched) if overall.comm_exposed_s >= _SLOW * overall.wall_s else None
    straggler = _slow_rank(ranks, matched, overall)
    if not connection:  # a rank that receives late also starts the next collective late
        straggler = straggler or _late_rank(ranks, matched, overall)
    capture = Capture(
        name=name,
        world_size=world_size,
        ranks=tuple(ranks),
        missing=missing,
        mean=overall,
        rank_means=means,
        collectives=collectives,
        straggler=straggler,
        slow_connection=connection,
        findings=(),
        notes=(*notes, *_notes(ranks, world_size, missing, collectives)),
        path=critical_path(ranks, matched),
    )
    return replace(capture, findings=tuple(findings(capture)))


def mean(times: Sequence[Times]) -> Times:
    """Returns the mean of each part of a step's time."""
    return Times(**{part: statistics.fmean(getattr(each, part) for each in times) for part in TIMES})


def _notes(
    ranks: Sequence[RankTrace], world_size: int, missing: Sequence[int], collectives: Sequence[CollectiveRow]
) -> Iterator[str]:
    if missing:
        yield f"traces of {len(missing)} of {world_size} ranks are missing: {first_of(missing)}"
    if len(ranks) == 1 < world_size and collectives:
        yield (
            "only one rank's trace was given, so it is unknown how long a collective waited for other ranks "
            "and how long it transferred data; record all ranks to see both"
        )
    for number in shifted_steps(ranks):
        yield (
            f"step {number} is not compared with the others: a step begins when the device has finished the "
            "one before it, and before the first one, the device was idle or ran something else"
        )


def _slow_rank(ranks: Sequence[RankTrace], matched: Sequence[Matched], overall: Times) -> Straggler | None:
    """Returns the rank whose own work takes longest, if it is significantly slower than the others."""
    if len(ranks) < 2:
        return None
    # The lower median over the steps, so that a rank is slow only if it is slow in most of them.
    excess = {
        region: {rank: statistics.median_low(own) for rank, own in _excesses(ranks, f"{region}_s").items()}
        for region in (*REGIONS, "other", "idle")
    }
    own = {trace.rank: sum(of_rank[trace.rank] for of_rank in excess.values()) for trace in ranks}
    rank = max(own, key=lambda rank: own[rank])
    region = max(excess, key=lambda region: excess[region][rank])
    excess_s = excess[region][rank]
    if min(own[rank], excess_s) < _SLOW * overall.wall_s:
        return None
    others = [trace for trace in ranks if trace.rank != rank]
    waited_s = statistics.fmean(step.times.comm_exposed_s for trace in others for step in trace.steps)
    slow = next(trace for trace in ranks if trace.rank == rank)
    waited_s -= statistics.fmean(step.times.comm_exposed_s for step in slow.steps)
    if waited_s < excess_s / 2:
        return None  # the other ranks do not wait for it
    last = Counter(collective.last for collective in matched)[rank]
    evidence = (
        f"its {region} takes {duration(excess_s)} per step longer than the median of the other ranks, "
        f"which wait {duration(waited_s)} per step longer in collectives"
    )
    if matched:
        evidence += f"; it was the last to start {last} of {len(matched)} collectives"
    more_s = statistics.fmean(max(0.0, each) for each in _excesses(ranks, "own_s", largest=True)[rank])
    share = min(excess_s, more_s) / overall.wall_s
    return Straggler(rank, region, excess_s, share, evidence, waited_s=excess_s)


def _late_rank(ranks: Sequence[RankTrace], matched: Sequence[Matched], overall: Times) -> Straggler | None:
    """Returns the rank that is most often the last to start a collective, if the others wait for it for a
    significant time.
    """
    num_steps = max(len(trace.steps) for trace in ranks)
    by_step, at_least = (_waits(matched, of) for of in (statistics.median, min))
    if not by_step:
        return None
    waited = {rank: _median(own, num_steps) for rank, own in by_step.items()}
    rank = max(waited, key=lambda rank: waited[rank])
    if waited[rank] < max(_SLOW * overall.wall_s, _LATE * sum(waited.values())):
        return None
    num_last = Counter(collective.last for collective in matched)[rank]
    late, least = _late_starts(ranks, rank, min), at_least[rank]
    gained_before_s = sum(min(wait_s, late.get(step, 0.0)) for step, wait_s in least.items()) / num_steps
    gain_s = min(waited[rank], sum(least.values()) / num_steps - gained_before_s)
    late, means = _late_starts(ranks, rank, _mean_with_itself), _waits(matched, _mean_with_itself)
    before_s = sum(min(wait_s, late.get(step, 0.0)) for step, wait_s in means[rank].items()) / num_steps
    mean_s = {other: sum(own.values()) / num_steps for other, own in means.items()}
    waited_s = mean_s.pop(rank)
    evidence = (
        f"it was the last to start {num_last} of {len(matched)} collectives, in which the ranks wait "
        f"{duration(waited_s)} per step for it (mean of all ranks)"
    )
    following = _following(ranks, mean_s, overall.wall_s)
    share = gain_s / overall.wall_s
    if before_s < _LITTLE * overall.wall_s:
        return Straggler(rank, "idle", waited_s, share, evidence + following, 0.0, waited_s)
    late_s = _median(_late_starts(ranks, rank, max), num_steps)
    evidence += (
        f". At least {duration(before_s)} of this is due to different starts of the ranks: its host begins "
        f"the step {duration(late_s)} after that of the first rank, for a cause before this "
        f"{'step' if num_steps > 1 else 'recording'}"
    )
    own = {trace.rank: trace.host_own_s for trace in ranks if trace.busy}
    rest_s = waited_s - before_s
    if rank in own and len(own) > 1 and rest_s >= _LITTLE * overall.wall_s:
        others_s = statistics.median(own_s for other, own_s in own.items() if other != rank)
        if own[rank] <= others_s and before_s >= rest_s:
            # Ranks that begin earlier also reach later collectives earlier, until they wait for the device.
            evidence += "; it stays last, because the others do their host work while they wait"
            rest_s = 0.0
        else:
            evidence += (
                f". The trace does not explain the rest, {duration(rest_s)}: without blocking calls, its "
                f"host works for {duration(own[rank])} in the step, others for {duration(others_s)} (median)"
            )
    share *= rest_s >= _LITTLE * overall.wall_s
    return Straggler(rank, "idle", rest_s, share, evidence + following, before_s, waited_s)


def _following(ranks: Sequence[RankTrace], waited: dict[int, float], wall_s: float) -> str:
    """Names the ranks that are late next, and the region in which their hosts take longer than all others."""
    longest = sorted(waited, key=lambda rank: -waited[rank])[:_MOST_FOLLOWING]
    named = [rank for rank in longest if waited[rank] >= _LITTLE * wall_s]
    others = [trace.host_s for trace in ranks if trace.rank not in named]
    if not named or not others:
        return ""
    own = [trace.host_s for trace in ranks if trace.rank in named]
    text = " and ".join(f"rank {rank} ({duration(waited[rank])})" for rank in named)
    least = {region: min(host_s.get(region, 0.0) for host_s in own) for region in REGIONS}
    most = {region: max(host_s.get(region, 0.0) for host_s in others) for region in REGIONS}
    region = max(REGIONS, key=lambda region: least[region] - most[region])
    if least[region] - most[region] >= _LITTLE * wall_s:
        takes = "host takes" if len(named) == 1 else "hosts take"
        text += (
            f", on which the {takes} at least {duration(least[region])} for {region}, on the others at "
            f"most {duration(most[region])}"
        )
    return f". Next {'is' if len(named) == 1 else 'are'} {text}"


def _mean_with_itself(others: Iterable[float]) -> float:
    """Returns the mean over the others and the late rank itself, which waits for nobody."""
    return statistics.fmean([*others, 0.0])


def _median(by_step: dict[int | None, float], num_steps: int) -> float:
    """Returns the lower median over all steps, in which a step without a value has 0."""
    return statistics.median_low([*by_step.values(), *[0.0] * (num_steps - len(by_step))])


def _waits(
    matched: Sequence[Matched], of: Callable[[Iterable[float]], float]
) -> defaultdict[int, dict[int | None, float]]:
    """Returns how long other ranks wait in each step for the last rank of each collective; with `min`, what
    the step would gain if this rank were as early as the next latest.

    The waiting time of a rank is the time by which its call of a collective is longer than that of the last
    rank. It is not longer than the last rank is late: if the network is slow, calls that begin at the same
    time have different lengths, too.
    """
    by_step: defaultdict[int, dict[int | None, float]] = defaultdict(lambda: defaultdict(float))
    for collective in matched:
        last = collective.calls[collective.last]
        others = [call for rank, call in collective.calls.items() if rank != collective.last]
        late_s = max(0.0, of([last.start_s - call.start_s for call in others]))
        waited_s = of([call.dur_s - last.dur_s for call in others])
        by_step[collective.last][last.step] += min(waited_s, late_s + LEAST_CLOCK_S)
    return by_step


def _late_starts(
    ranks: Sequence[RankTrace], late: int, of: Callable[[Iterable[float]], float]
) -> dict[int | None, float]:
    """Returns how much later than the other ranks the host of one rank begins each step."""
    begins: defaultdict[int, dict[int, float]] = defaultdict(dict)
    for trace in ranks:
        for step in trace.steps:
            begins[step.number][trace.rank] = step.limits_s(on_host=True)[0]
    return {
        number: max(0.0, of([own.get(late, start) - start for rank, start in own.items() if rank != late]))
        for number, own in begins.items()
        if len(own) > 1
    }


def _excesses(ranks: Sequence[RankTrace], part: str, *, largest: bool = False) -> dict[int, list[float]]:
    """Returns, for each rank, how many seconds longer it takes for a part of each step than the median of the
    other ranks, or the largest of them.
    """
    by_step: defaultdict[int, dict[int, float]] = defaultdict(dict)
    for trace in ranks:
        for step in trace.steps:
            by_step[step.number][trace.rank] = getattr(step.times, part)
    excesses: dict[int, list[float]] = {trace.rank: [] for trace in ranks}
    for own in by_step.values():
        times = np.array([*own.values()])
        for rank, excess in zip(own, (times - _of_others(times, largest=largest)).tolist(), strict=True):
            excesses[rank].append(excess)
    return excesses


def _of_others(values: npt.NDArray[np.float64], *, largest: bool) -> npt.NDArray[np.float64]:
    """Returns for each value the largest or the median of the others, or itself if there are none."""
    if len(values) < 2:
        return values
    ordered, last = np.sort(values), len(values) - 2
    at = np.searchsorted(ordered, values)
    # In `ordered`, the others after the value are one place later than among themselves.
    low, high = (last, last) if largest else (last // 2, (last + 1) // 2)
    chosen: npt.NDArray[np.float64] = (ordered[low + (at <= low)] + ordered[high + (at <= high)]) / 2
    return chosen
