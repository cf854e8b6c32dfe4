"""All ranks of a run together: means, the rank that is waited for, what a reader should know first."""

from __future__ import annotations

import statistics
from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

from ddp_hpc.trace.folder import read_ranks, trace_files
from ddp_hpc.trace.matching import Matched, aligned, match, rows
from ddp_hpc.trace.model import (
    PARTS,
    REGIONS,
    Capture,
    CollectiveRow,
    RankTrace,
    SlowLoad,
    Straggler,
    Times,
)
from ddp_hpc.units import duration, format_bytes

_SLOW = 0.05
"""Of a step: what a rank has to be slower than the others to be named."""
_MUCH = 0.05
"""Of a step: what is worth a sentence."""
WORDS = {
    "data": "waiting for data",
    "forward": "forward",
    "backward": "backward",
    "optimizer": "the optimizer",
    "snapshot": "snapshots",
    "other": "other computing",
    "comm_exposed": "communication that nothing hides",
    "idle": "idle",
}
"""The parts of a step, for people."""


def read_capture(
    path: Path,
    name: str | None = None,
    num_processes: int | None = None,
    seen: Callable[[Path], None] = lambda _: None,
) -> Capture:
    """What the traces of a folder tell together; `seen` hears of each file that was read.

    Raises:
        RequestError: there is none, or nothing in them can be measured.
        DdpHpcError: a file cannot be read.
    """
    ranks, notes = read_ranks(trace_files(path), num_processes, seen)
    ranks, moved = aligned(ranks)
    return capture_of(name or path.resolve().name, ranks, (*notes, *moved))


def capture_of(name: str, ranks: Sequence[RankTrace], notes: Sequence[str] = ()) -> Capture:
    """The ranks of one run, together."""
    world_size = max(ranks[0].world_size, ranks[-1].rank + 1)
    missing = tuple(sorted(set(range(world_size)) - {trace.rank for trace in ranks}))
    matched = match(ranks)
    means = tuple(mean([step.times for step in trace.steps]) for trace in ranks)
    overall = mean([step.times for trace in ranks for step in trace.steps])
    collectives = rows(ranks, matched)
    straggler = _straggler(ranks, matched, overall)
    load = _slowest_load(ranks)
    num_steps = max(len(trace.steps) for trace in ranks)
    return Capture(
        name=name,
        world_size=world_size,
        ranks=tuple(ranks),
        missing=missing,
        mean=overall,
        rank_means=means,
        collectives=collectives,
        straggler=straggler,
        slowest_load=load,
        findings=tuple(_findings(overall, straggler, load, collectives, num_steps)),
        notes=tuple(notes) + _missing(missing, world_size),
    )


def mean(times: Sequence[Times]) -> Times:
    """The mean of each part."""
    return Times(
        **{part: statistics.fmean(getattr(one, part) for one in times) for part in (*PARTS, "comm_hidden_s")}
    )


def _missing(missing: Sequence[int], world_size: int) -> tuple[str, ...]:
    if not missing:
        return ()
    shown = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
    return (f"of {world_size} ranks, {len(missing)} have no trace here: {shown}",)


def _straggler(ranks: Sequence[RankTrace], matched: Sequence[Matched], overall: Times) -> Straggler | None:
    """The rank whose own work takes longest, if that is clearly longer than the others'."""
    if len(ranks) < 2:
        return None
    # The median over the steps: one slow step does not make a slow rank.
    excess = {region: _excesses(ranks, f"{region}_s") for region in (*REGIONS, "other", "idle")}
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
        return None  # nobody waits for it
    last = Counter(one.last for one in matched)[rank]
    evidence = (
        f"its {region} takes {duration(excess_s)} a step longer than the median of the others, "
        f"which wait {duration(waited_s)} a step more in collectives than it does"
    )
    if matched:
        evidence += f"; it came last to {last} of {len(matched)} of them"
    return Straggler(rank, region, excess_s, excess_s / overall.wall_s, evidence)


def _excesses(ranks: Sequence[RankTrace], part: str) -> dict[int, float]:
    """By how much a part of a step is longer on each rank than the median of the others, in most steps."""
    by_step: defaultdict[int, list[float]] = defaultdict(list)
    for trace in ranks:
        for step in trace.steps:
            insort(by_step[step.number], getattr(step.times, part))
    return {
        trace.rank: statistics.median(
            own - _median_without(by_step[step.number], own) if len(by_step[step.number]) > 1 else 0.0
            for step in trace.steps
            for own in [getattr(step.times, part)]
        )
        for trace in ranks
    }


def _median_without(ordered: list[float], own: float) -> float:
    """The median of all but one of the values."""
    at = bisect_left(ordered, own)
    last = len(ordered) - 2
    low, high = (ordered[i if i < at else i + 1] for i in (last // 2, (last + 1) // 2))
    return (low + high) / 2


def _slowest_load(ranks: Sequence[RankTrace]) -> SlowLoad | None:
    loads = [
        (span.dur_s, trace.rank, span.step)
        for trace in ranks
        for span in trace.spans
        if span.name == "data" and span.step is not None
    ]
    if not loads:
        return None
    dur_s, rank, step = max(loads)
    return SlowLoad(rank, step, dur_s, statistics.median(load[0] for load in loads))


def _findings(
    overall: Times,
    straggler: Straggler | None,
    load: SlowLoad | None,
    collectives: Sequence[CollectiveRow],
    num_steps: int,
) -> list[str]:
    wall_s = overall.wall_s or 1.0
    shares = sorted(((getattr(overall, f"{part}_s"), words) for part, words in WORDS.items()), reverse=True)
    parts = ", ".join(f"{part_s / wall_s:.0%} {words}" for part_s, words in shares if part_s >= 0.01 * wall_s)
    found = [f"A step takes {duration(overall.wall_s)}: {parts}."]
    if straggler:
        found.append(
            f"Rank {straggler.rank} is slow: {straggler.evidence}. Without it a step would be up to "
            f"{straggler.share:.0%} shorter."
        )
    if load and load.dur_s > max(3 * load.median_s, 0.02 * wall_s):
        found.append(
            f"The slowest data load is rank {load.rank}'s of step {load.step}: {duration(load.dur_s)}, "
            f"where the median is {duration(load.median_s)}."
        )
    if overall.data_s >= _MUCH * wall_s:
        found.append(
            f"{overall.data_s / wall_s:.0%} of a step is waiting for data: see ddp-hpc bench io for what a "
            "batch costs in other formats, and --workers or --stage."
        )
    total_s = sum(row.total_s for row in collectives)
    if collectives and total_s:
        row = collectives[0]
        of_size = f" of {format_bytes(row.bytes)}" if row.bytes else ""
        bandwidth = f", {row.busbw_bytes_per_s / 1e9:.3g} GB/s of bus bandwidth" if row.bytes else ""
        found.append(
            f"Of all collectives {row.kind}{of_size} keeps the network busiest: "
            f"{row.num_calls / num_steps:.3g} a step, of {duration(row.median_s)} each, of which "
            f"the network takes {duration(row.transfer_s)}{bandwidth}."
        )
        hidden = overall.comm_hidden_s + overall.comm_exposed_s
        if hidden:
            found.append(
                f"{overall.comm_hidden_s / hidden:.0%} of the communication is hidden behind computing."
            )
    return found
