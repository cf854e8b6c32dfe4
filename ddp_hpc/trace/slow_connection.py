"""Finds the slow connection in a ring of ranks, from the order in which the ranks end a collective."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence

from ddp_hpc.trace.analysis_results import RankTrace, SlowConnection
from ddp_hpc.trace.match_collectives import LEAST_CLOCK_S, Matched

_LEAST_CALLS = 5
"""The least number of collectives that one rank must end last."""
_MOST_CALLS = 0.6
"""The fraction of the collectives that this rank must end last."""
_LARGE = 0.1
"""Fraction of the largest all_reduce; smaller ones depend on the latency rather than on the bandwidth."""
_PART = 0.5
"""Fraction of the time in which a chunk is sent, by which this rank must end later than the others."""


def slow_connection(ranks: Sequence[RankTrace], matched: Sequence[Matched]) -> SlowConnection | None:
    """Returns the connection for which the ring of all ranks waits, if there is one.

    For an all_reduce, gloo divides a buffer into one chunk per rank. Each rank sends 2(n-1) chunks to the
    rank before it, and passes on all that it receives except for the last one. If a connection is slow, its
    receiver therefore ends one chunk later than all ranks but the sender, which may be as late.
    """
    num_ranks = len(ranks)
    if num_ranks < 2 or any(not trace.is_ring or trace.world_size != num_ranks for trace in ranks):
        return None
    rings = [ring for ring in matched if len(ring.calls) == num_ranks and ring.first.kind == "all_reduce"]
    least_bytes = _LARGE * max((ring.first.bytes for ring in rings), default=0)
    rings = [ring for ring in rings if ring.first.bytes >= least_bytes]
    lags: defaultdict[int, list[float]] = defaultdict(list)
    for ring in rings:
        ends = {rank: call.start_s + call.dur_s for rank, call in ring.calls.items()}
        last = max(ends, key=lambda rank: ends[rank])
        end_s = ends.pop(last)
        if num_ranks > 2:
            ends.pop((last + 1) % num_ranks, None)
        lags[last].append(end_s - max(ends.values()))
    receiver = max(lags, key=lambda rank: len(lags[rank]), default=0)
    if len(lags[receiver]) < max(_LEAST_CALLS, _MOST_CALLS * len(rings)):
        return None
    chunk_s = statistics.median(ring.transfer_s for ring in rings) / (2 * (num_ranks - 1))
    lag_s = statistics.median(lags[receiver])
    if lag_s < max(LEAST_CLOCK_S, _PART * chunk_s):
        return None
    sender = (receiver + 1) % num_ranks
    return SlowConnection(sender, receiver, lag_s, len(lags[receiver]), len(rings))
