"""The rows of `ddp-hpc bench comm`: what is measured, one after another, on all ranks together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ddp_hpc.bench.comm_buckets import Bucket
from ddp_hpc.bench.comm_collectives import MAKERS, Members
from ddp_hpc.bench.comm_ranks import Division
from ddp_hpc.bench.comm_request import CommBench, Effort, num_elements
from ddp_hpc.bench.comm_timing import speeds, time_operation
from ddp_hpc.errors import DdpHpcError, stop_together
from ddp_hpc.tables import Row
from ddp_hpc.trace.names import busbw_factor
from ddp_hpc.training.failure import explain_lost_contact
from ddp_hpc.training.group import Group
from ddp_hpc.units import format_bytes

_MAX_NAMED = 4


class RefusedError(DdpHpcError):
    """The backend does not do this; all ranks know."""


@dataclass(frozen=True)
class Case:
    """One row before it is measured."""

    name: str
    kind: str  # of comm_request.KINDS
    count: int  # elements in all
    dtype: str

    @property
    def torch_dtype(self) -> torch.dtype:
        """The type of its elements."""
        found = getattr(torch, self.dtype)
        assert isinstance(found, torch.dtype)
        return found

    @property
    def num_bytes(self) -> int:
        """Its size, as nccl-tests counts it."""
        return self.count * self.torch_dtype.itemsize

    def identity(self, division: Division) -> Row:
        """The fields of its row that are known before."""
        return {
            "name": self.name,
            "bytes": self.num_bytes,
            "dtype": self.dtype,
            "ranks": len(division.ranks),
            "ranks_per_node": division.per_node,
        }

    def __str__(self) -> str:
        return f"{self.name} of {format_bytes(self.num_bytes)}"


def cases_of(bench: CommBench, buckets: Sequence[Bucket], num_ranks: int) -> list[list[Case]]:
    """All cases on so many ranks, each collective's together; those of a model's buckets where it has any."""
    if buckets:
        return [
            [
                Case(f"bucket_{number}", "all_reduce", bucket.num_elements, bucket.dtype)
                for number, bucket in enumerate(buckets)
            ]
        ]
    itemsize = Case("", "", 1, bench.dtype).num_bytes
    found = []
    for name in bench.collectives:
        counts = [num_elements(name, size, itemsize, num_ranks) for size in bench.sizes]
        found.append([Case(name, name, count, bench.dtype) for count in dict.fromkeys(counts)])
    return found


def measure(
    case: Case,
    division: Division,
    members: Members | None,
    group: Group,
    effort: Effort,
    tick: Callable[[], None],
    say: Callable[[str], None],
) -> Row | None:
    """The row, on the members. Collective: every rank must call this, also those that are no members.

    The result is checked before and after the timed iterations, on fresh numbers; `say` gets lines on what
    was wrong.

    Raises:
        RefusedError: the backend raises an error for it on all members.
        DdpHpcError: it does so on some of them alone.
    """
    operation, refusal, wrong = None, "", ""
    tick()
    if members is not None:
        try:
            operation = MAKERS[case.kind](members, case.count, case.torch_dtype)
            wrong = operation.find_wrong(members)
        except RuntimeError as error:  # NotImplementedError is one, and so is what torch raises
            if explain_lost_contact(error, 0.0):
                raise
            refusal = str(error).strip().partition("\n")[0] or type(error).__name__
    _agree_on_refusal(case, division, group, refusal)

    longest_s = 0.0
    if members is not None and operation is not None and effort.warmup:
        longest_s = max(time_operation(operation, members, effort.warmup, tick)[-3:])
    num = group.comm.bcast(effort.num_iterations(longest_s))  # rank 0 is a member of every division
    taken_s: list[float] = []
    if members is not None and operation is not None:
        taken_s = time_operation(operation, members, num, tick)
        tick()
        wrong_again = operation.find_wrong(members)
        wrong = wrong or wrong_again
    problems = [(rank, text) for rank, text in enumerate(group.comm.allgather(wrong)) if text]
    for rank, text in problems[:_MAX_NAMED]:
        say(f"wrong result: {case} on {division}: rank {rank} has {text}")
    if len(problems) > _MAX_NAMED:
        say(f"wrong result: {case} on {division}: and {len(problems) - _MAX_NAMED} more ranks")
    if members is None:
        return None
    return {
        **case.identity(division),
        "iterations": num,
        **speeds(taken_s, case.num_bytes, busbw_factor(case.kind, members.size)),
        "correct": not problems,
    }


def _agree_on_refusal(case: Case, division: Division, group: Group, refusal: str) -> None:
    """Collective: every rank must call this."""
    refused = {rank: text for rank, text in enumerate(group.comm.allgather(refusal)) if text}
    if not refused:
        return
    rank, text = next(iter(refused.items()))
    if set(refused) != set(division.ranks):
        stop_together(
            group.world.rank,
            DdpHpcError(f"{case} on {division}: rank {rank} failed alone: {text}; look at its node"),
        )
    raise RefusedError(text)
