"""Measures the rows of `ddp-hpc bench comm` on all ranks, one after the other."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ddp_hpc.base.errors import DdpHpcError, stop_together
from ddp_hpc.base.text_table import Row
from ddp_hpc.base.units import duration, format_bytes
from ddp_hpc.bench.comm.collectives import MAKERS, Members
from ddp_hpc.bench.comm.parse_options import CommBench, Effort, num_elements
from ddp_hpc.bench.comm.timing import speeds, time_operation
from ddp_hpc.trace.event_names import busbw_factor
from ddp_hpc.training.process_group.errors_of_torch import explain_lost_contact
from ddp_hpc.training.process_group.group import Group

_MAX_NAMED = 4
_LARGE_BYTES = 1 << 20
"""The least size of messages that depend on the bandwidth of a connection."""


class RefusedError(DdpHpcError):
    """The backend does not support the collective; raised on all ranks."""


@dataclass(frozen=True)
class Case:
    """One row of the results: a collective with a number of elements and their data type."""

    name: str  # the collective, one of parse_options.KINDS
    count: int  # total number of elements
    dtype: str

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of the elements."""
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def num_bytes(self) -> int:
        """The size as defined by nccl-tests."""
        return self.count * self.torch_dtype.itemsize

    def __str__(self) -> str:
        return f"{self.name} of {format_bytes(self.num_bytes)}"


def cases_of(bench: CommBench, num_ranks: int) -> list[list[Case]]:
    """Returns the cases for a number of ranks, grouped by collective."""
    itemsize = Case("", 1, bench.dtype).num_bytes
    groups = []
    for name in bench.collectives:
        counts = [num_elements(name, size, itemsize, num_ranks) for size in bench.sizes]
        groups.append([Case(name, count, bench.dtype) for count in dict.fromkeys(counts)])
    return groups


def measure(
    case: Case,
    members: Members,
    group: Group,
    effort: Effort,
    tick: Callable[[], None],
    say: Callable[[str], None],
) -> Row:
    """Measures a row. Collective: every rank must call this.

    The result is checked before and after the timed iterations; `say` is called with lines about errors.

    Raises:
        RefusedError: the backend raised an error on all ranks.
        DdpHpcError: the backend raised an error on some of the ranks.
    """
    operation, refusal, wrong = None, "", ""
    tick()
    try:
        operation = MAKERS[case.name](members, case.count, case.torch_dtype)
        wrong = operation.find_wrong(members)
    except RuntimeError as error:  # also NotImplementedError and torch's errors, which are subclasses
        if explain_lost_contact(error, 0.0):
            raise
        refusal = str(error).strip().partition("\n")[0] or type(error).__name__
    _agree_on_refusal(case, group, refusal)
    assert operation is not None

    longest_s = 0.0
    if effort.warmup:
        longest_s = max(time_operation(operation, members, effort.warmup, tick)[0][-3:])
    num = group.comm.bcast(effort.num_iterations(longest_s))
    taken_s, own_s = time_operation(operation, members, num, tick)
    medians_s = group.comm.allgather(statistics.median(own_s))
    # Connections between nodes are slower than those in a node.
    is_alike = members.per_node in (1, members.size)
    is_comparable = is_alike and case.name == "send_recv" and case.num_bytes >= _LARGE_BYTES
    if is_comparable and (line := slow_connections(medians_s)):
        say(f"{case}: {line}")
    tick()
    wrong_after = operation.find_wrong(members)
    wrong = wrong or wrong_after
    problems = [(rank, text) for rank, text in enumerate(group.comm.allgather(wrong)) if text]
    for rank, text in problems[:_MAX_NAMED]:
        say(f"wrong result: {case}: rank {rank} has {text}")
    if len(problems) > _MAX_NAMED:
        say(f"wrong result: {case}: also on {len(problems) - _MAX_NAMED} more ranks")
    return {
        "name": case.name,
        "bytes": case.num_bytes,
        "dtype": case.dtype,
        "ranks": members.size,
        "ranks_per_node": members.per_node,
        "iterations": num,
        **speeds(taken_s, case.num_bytes, busbw_factor(case.name, members.size)),
        "correct": not problems,
    }


def slow_connections(medians_s: Sequence[float]) -> str:
    """Returns a sentence about the ranks whose send_recv takes long, or an empty string.

    A rank waits for its own two transfers only. A rank is slow if it takes more than half as long as the
    slowest rank, and the fastest one does not.
    """
    fastest_s, fastest = min((median_s, rank) for rank, median_s in enumerate(medians_s))
    slowest_s = max(medians_s)
    if fastest_s >= slowest_s / 2:
        return ""
    slow = [rank for rank, median_s in enumerate(medians_s) if median_s > slowest_s / 2]
    named = ", ".join(map(str, slow[:_MAX_NAMED])) + (", ..." if len(slow) > _MAX_NAMED else "")
    return (
        f"rank {fastest} takes {duration(fastest_s)}, but slower ranks up to {duration(slowest_s)}: {named}. "
        "Each rank sends to the next one, so check the connections of these ranks"
    )


def _agree_on_refusal(case: Case, group: Group, refusal: str) -> None:
    """Raises an error on all ranks if the backend failed on any. Collective: every rank must call this."""
    refused = {rank: text for rank, text in enumerate(group.comm.allgather(refusal)) if text}
    if not refused:
        return
    rank, text = next(iter(refused.items()))
    if len(refused) < group.world.world_size:
        error = DdpHpcError(f"{case}: only rank {rank} failed: {text}; check its node")
        stop_together(group.world.rank, error)
    raise RefusedError(text)
