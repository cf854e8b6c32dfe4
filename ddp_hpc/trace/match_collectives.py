"""Matches the calls of each collective across ranks, corrects clocks, and measures transfer times."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from ddp_hpc.trace.analysis_results import Collective, CollectiveRow, RankTrace
from ddp_hpc.trace.event_names import annotated_kind, bus_bandwidth, waits
from ddp_hpc.trace.named_results import Curve

_TOGETHER = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
"""The collectives that end on no rank before all ranks have started them."""
LEAST_CLOCK_S = 1e-3
"""The least difference between the clocks of two hosts that is corrected."""
_LEAST_APART_S = 2e-5
"""The least time between two calls on one host for which they are certainly not the same collective."""

_Kind: TypeAlias = tuple[str, str, int, int]


@dataclass(frozen=True)
class Matched:
    """One collective with the call of each rank."""

    calls: dict[int, Collective]

    @property
    def first(self) -> Collective:
        """The call of one of the ranks, which has the same kind and group as the others."""
        return next(iter(self.calls.values()))

    @property
    def last(self) -> int:
        """The rank that started last. It did not wait, so its call is the shortest; no clocks are needed."""
        return min(self.calls, key=lambda rank: self.calls[rank].dur_s)

    @property
    def transfer_s(self) -> float:
        """Time from the start on the last rank to the end."""
        return self.calls[self.last].dur_s


def _kind(call: Collective) -> _Kind:
    return call.kind, call.group, call.num_ranks, call.bytes


def match(ranks: Sequence[RankTrace]) -> list[Matched]:
    """Matches the k-th call of each kind and size on all ranks of the group; for all_to_all, sizes differ.

    If the ranks have recorded different numbers of calls, the calls are counted within each step. Calls that
    cannot be the same collective, since one ends before another begins, are omitted: others are missing.
    """
    hosts = {trace.rank: trace.host for trace in ranks}
    by_kind: defaultdict[_Kind, dict[int, list[Collective]]] = defaultdict(dict)
    for trace in ranks:
        for call in trace.collectives:
            key = _kind(call) if call.kind != "all_to_all" else (*_kind(call)[:-1], 0)
            by_kind[key].setdefault(trace.rank, []).append(call)
    matched = []
    for (kind, _, num_ranks, _), calls in by_kind.items():
        # If a backend does not record the group, calls in several groups could be mistaken for one.
        if (
            kind.startswith(_TOGETHER)
            and 1 < len(calls) <= num_ranks
            and len(calls) == min(num_ranks, len(ranks))
        ):
            matched += [Matched(group) for group in _same(calls) if _overlap(group, hosts)]
    return matched


def _overlap(calls: dict[int, Collective], hosts: dict[int, str]) -> bool:
    """Returns whether, by the clock of each host, all of its ranks start before one of them ends."""
    starts, ends = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    for rank, call in calls.items():
        starts[hosts[rank]].append(call.start_s)
        ends[hosts[rank]].append(call.start_s + call.dur_s)
    return all(max(starts[host]) <= min(ends[host]) + _LEAST_APART_S for host in starts)


def _same(calls: dict[int, list[Collective]]) -> Iterator[dict[int, Collective]]:
    if len({len(own) for own in calls.values()}) == 1:
        for row in zip(*calls.values(), strict=True):
            yield dict(zip(calls, row, strict=True))
        return
    steps: defaultdict[int | None, dict[int, list[Collective]]] = defaultdict(dict)
    for rank, own in calls.items():
        for call in own:
            steps[call.step].setdefault(rank, []).append(call)
    for step, of_step in steps.items():
        if step is not None and len(of_step) == len(calls) and len({len(o) for o in of_step.values()}) == 1:
            yield from _same(of_step)


def aligned(ranks: Sequence[RankTrace]) -> tuple[tuple[RankTrace, ...], list[str]]:
    """Corrects all times to the clock of the first rank's host; also returns a note per corrected host.

    A collective ends on all ranks at the same time, so differences between the ends are clock offsets. If a
    connection of a ring is slow, however, the ends differ by up to half of the transfer.
    """
    reference = ranks[0]
    if all(trace.host == reference.host for trace in ranks):
        return tuple(ranks), []
    differences: defaultdict[str, list[float]] = defaultdict(list)
    matched = match(ranks)
    transfer_s = statistics.median(m.transfer_s for m in matched) if matched and reference.is_ring else 0.0
    for collective in matched:
        if (own := collective.calls.get(reference.rank)) is None:
            continue
        for trace in ranks:
            if trace.host != reference.host and (call := collective.calls.get(trace.rank)):
                differences[trace.host].append(call.start_s + call.dur_s - own.start_s - own.dur_s)
    offsets, notes = {}, []
    for host, values in sorted(differences.items()):
        offset_s = statistics.median(values)
        spread_s = statistics.median(abs(value - offset_s) for value in values)
        if abs(offset_s) > max(LEAST_CLOCK_S, 3 * spread_s, transfer_s / 2):
            offsets[host] = offset_s
            side = "ahead of" if offset_s > 0 else "behind"
            notes.append(
                f"the clock of {host} is {abs(offset_s) * 1e3:.1f} ms {side} that of {reference.host} "
                f"(measured by {len(values)} collectives); its times were corrected"
            )
    return tuple(_moved(trace, -offsets.get(trace.host, 0.0)) for trace in ranks), notes


def _moved(trace: RankTrace, by_s: float) -> RankTrace:
    if not by_s:
        return trace
    return replace(
        trace,
        steps=tuple(replace(step, start_s=step.start_s + by_s) for step in trace.steps),
        collectives=tuple(replace(call, start_s=call.start_s + by_s) for call in trace.collectives),
        busy=tuple((start_s + by_s, end_s + by_s, share) for start_s, end_s, share in trace.busy),
        clock_ns=trace.clock_ns + round(by_s * 1e9),
        named=tuple(
            event._replace(start_s=event.start_s + by_s, launched_s=event.launched_s + by_s)
            for event in trace.named
        ),
        memory=tuple(replace(memory, curve=_moved_curve(memory.curve, by_s)) for memory in trace.memory),
        queue=_moved_curve(trace.queue, by_s),
    )


def _moved_curve(curve: Curve, by_s: float) -> Curve:
    return tuple(values if i else tuple(at_s + by_s for at_s in values) for i, values in enumerate(curve))


def rows(ranks: Sequence[RankTrace], matched: Sequence[Matched]) -> tuple[CollectiveRow, ...]:
    """Returns a row per kind and size of the calls in the steps, sorted by total transfer time without waits
    for late ranks.

    The size of an all_to_all is that of its first rank.
    """
    first = {id(call): collective.first for collective in matched for call in collective.calls.values()}
    calls: defaultdict[_Kind, list[tuple[int, Collective]]] = defaultdict(list)
    for trace in ranks:
        for call in trace.collectives:
            if call.step is not None:
                calls[_kind(first.get(id(call), call))].append((trace.rank, call))
    transfers: defaultdict[_Kind, list[float]] = defaultdict(list)
    for collective in matched:
        transfers[_kind(collective.first)].append(collective.transfer_s)
    table = []
    for key, own in calls.items():
        kind, _, num_ranks, num_bytes = key
        durations, num_callers = [call.dur_s for _, call in own], len({rank for rank, _ in own})
        median_s = statistics.median(durations)
        known = transfers.get(key) or (durations if num_ranks == 1 else [])
        transfer_s = statistics.median(known) if known else None
        total_s, num_calls = sum(durations) / num_callers, round(len(own) / num_callers)
        slowest_rank, slowest = max(own, key=lambda item: item[1].dur_s)
        callers = slowest.callers.split(" > ")[::-1]
        table.append(
            CollectiveRow(
                *key,
                num_calls=num_calls,
                median_s=median_s,
                total_s=total_s,
                exposed_s=sum(call.exposed_s for _, call in own) / num_callers,
                transfer_s=transfer_s,
                # A median would count the transfers of the few calls that take much longer as waiting.
                transfers_s=min(statistics.fmean(known) * num_calls, total_s) if known else 0.0,
                busbw_bytes_per_s=bus_bandwidth(kind, num_ranks, num_bytes, transfer_s) or None,
                slowest_s=slowest.dur_s,
                slowest_rank=slowest_rank,
                slowest_step=slowest.step,
                slowest_in=next((one for one in callers if not (waits(one) or annotated_kind(one))), ""),
                blocks=max(call.blocks for _, call in own),
            )
        )
    return tuple(sorted(table, key=lambda row: -(row.transfers_s or row.num_calls * row.median_s)))
