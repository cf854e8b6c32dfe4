"""The groups of ranks that call collectives together: all ranks, or the first few ranks of each node."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from ddp_hpc.base.errors import RequestError
from ddp_hpc.bench.comm.collectives import Members
from ddp_hpc.training.process_group.group import Group


@dataclass(frozen=True)
class Division:
    """A subset of the ranks that calls collectives together."""

    ranks: tuple[int, ...]
    per_node: int | None
    """Number of ranks per node; None if it differs between nodes."""

    def __str__(self) -> str:
        each = "" if self.per_node is None else f", {self.per_node} per node"
        return f"{len(self.ranks)} ranks{each}"


def divide(nodes: Sequence[Hashable], requested: Sequence[int | None]) -> tuple[list[Division], list[str]]:
    """Returns the groups of ranks to measure, and notes about those that are skipped.

    Args:
        nodes: the identifier of the node of each rank.
        requested: numbers of ranks per node; None for all.

    Raises:
        RequestError: no group is left.
    """
    members: dict[Hashable, list[int]] = {}
    for rank, node in enumerate(nodes):
        members.setdefault(node, []).append(rank)
    found: dict[tuple[int, ...], Division] = {}
    notes = []
    for number in requested:
        chosen = [ranks[:number] for ranks in members.values()]
        ranks = tuple(sorted(rank for some in chosen for rank in some))
        counts = {len(some) for some in chosen}
        if len(ranks) < 2:
            notes.append(f"--ranks-per-node {number}: skipped, since it is a single rank on one node")
        elif ranks in found:
            notes.append(
                f"--ranks-per-node {number or 'all'}: skipped, since the ranks are the same as before"
            )
        else:
            found[ranks] = Division(ranks, counts.pop() if len(counts) == 1 else None)
    if not found:
        raise RequestError(f"{'; '.join(notes)}. Use a larger number or `all`, or more nodes.")
    return list(found.values()), notes


def nodes_of(group: Group) -> list[Hashable]:
    """Returns an identifier of the node of each rank. Collective: every rank must call this.

    This is the node rank of the launcher, since hostnames may not be unique, or else the hostname.
    """
    nodes = group.comm.allgather([group.world.node_rank, group.world.hostname])
    known = all(node_rank is not None for node_rank, _ in nodes)
    return [node_rank if known else hostname for node_rank, hostname in nodes]


def gather_members(division: Division, group: Group, timeout_s: float) -> Members | None:
    """Creates the process group of this subset of the ranks; returns None on all other ranks.

    Collective: every rank must call this. `timeout_s` is the time limit of a collective.
    """
    world = group.world
    whole = len(division.ranks) == world.world_size
    made = dist.group.WORLD if whole else dist.new_group(list(division.ranks), timedelta(seconds=timeout_s))
    if world.rank not in division.ranks:
        return None
    assert isinstance(made, dist.ProcessGroup)
    return Members(made, division.ranks, division.ranks.index(world.rank), group.device)
