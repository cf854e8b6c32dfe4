"""Rank 0 of the check: it collects what the ranks find, until all have answered or the time is up."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ddp_hpc.node_check.results import COLLECTIVE, Problem, RankResult, Results
from ddp_hpc.rendezvous.store_client import StoreClient, StoreTimeoutError

JOINED, DEVICE, GO, LATER, END = "joined", "device", "go", "later", "end"
"""The keys in the store, in the order of the check."""
ANSWER_S = 20.0
"""Limit for one answer of the store."""
_START_S, _DEVICE_S, _MOST_S = 30.0, 12.0, 120.0
# Each rank connects to others, through one store.
_COLLECTIVE_S, _RANKS_PER_S = 8.0, 200
# Ranks that import torch from a busy file system are not bad. If half of them need long, the others may too.
_TIMES = 2.0
_POLL_S = 0.1


@dataclass(frozen=True)
class _Phase:
    """What the ranks have given, when it arrived (Unix time), and for how long was waited."""

    given: Mapping[int, dict[str, Any]]
    arrived_s: Mapping[int, float]
    waited_s: float


def coordinate(store: StoreClient, world_size: int) -> Results:
    """Leads all ranks through the check, and returns their results."""
    joined = _collect(store, JOINED, world_size, _START_S)
    own = _collect(store, DEVICE, len(joined.given), _DEVICE_S)
    is_whole = len(own.given) == world_size and not any(each["problems"] for each in own.given.values())
    sent_s = time.time()
    store.set(GO, json.dumps({"sent_s": sent_s, "all_reduce": is_whole}).encode(), ANSWER_S)
    later = _collect(store, LATER, len(own.given), collective_s(world_size))
    ranks = []
    for rank, who in sorted(joined.given.items()):
        found, last = own.given.get(rank), later.given.get(rank)
        problems = [Problem(**each) for given in (found, last) if given for each in given["problems"]]
        if found is None:
            problems.append(_no_answer(store, rank, "no answer", own.waited_s))
        elif last is None:
            problems.append(_no_answer(store, rank, COLLECTIVE, later.waited_s))
        # A message takes time, so it only gives a bound for the difference of two clocks.
        clock_s = None
        if last is not None:
            clock_s = (last["sent_s"] - later.arrived_s[rank], last["received_s"] - sent_s)
        ranks.append(
            RankResult(
                rank=rank,
                host=who["host"],
                local_size=who["local_size"],
                num_devices=found["num_devices"] if found else None,
                clock_s=clock_s,
                problems=tuple(problems),
            )
        )
    return Results(world_size=world_size, ranks=tuple(ranks))


def collective_s(world_size: int) -> float:
    """Returns the limit of the all-reduce."""
    return _COLLECTIVE_S + world_size / _RANKS_PER_S


def stage_key(rank: int) -> str:
    """Returns the key under which a rank stores what it is doing."""
    return f"stage/{rank}"


def _collect(store: StoreClient, key: str, number: int, limit_s: float) -> _Phase:
    """Waits until `number` ranks have given a value, or for `limit_s` after half of them have."""
    arrived_s: dict[int, float] = {}
    begin_s, end_s = time.monotonic(), None
    while True:
        given = store.given(key, ANSWER_S)
        arrived_s = dict.fromkeys(given, time.time()) | arrived_s
        waited_s = time.monotonic() - begin_s
        if end_s is None and 2 * len(given) >= number:
            end_s = waited_s + max(limit_s, _TIMES * waited_s)
        if len(given) >= number or waited_s > min(end_s or _MOST_S, _MOST_S):
            return _Phase({rank: json.loads(text) for rank, text in given.items()}, arrived_s, waited_s)
        time.sleep(_POLL_S)


def _no_answer(store: StoreClient, rank: int, kind: str, waited_s: float) -> Problem:
    where, stage = f"rank {rank}", "starting"
    try:
        if store.check([stage_key(rank)], ANSWER_S):
            where, stage = json.loads(store.get([stage_key(rank)], ANSWER_S)[0])
    except StoreTimeoutError:
        pass
    return Problem(kind, f"no answer from {where} within {waited_s:.0f} s ({stage})")
