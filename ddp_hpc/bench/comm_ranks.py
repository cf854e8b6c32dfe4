"""Which ranks call a collective together: all of them, or the first few of each node."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from ddp_hpc.bench.comm_collectives import Members
from ddp_hpc.errors import RequestError
from ddp_hpc.training.group import Group


@dataclass(frozen=True)
class Division:
    """Some ranks of the world."""

    ranks: tuple[int, ...]
    per_node: int | None
    """Of each node; None where nodes have different numbers."""

    def __str__(self) -> str:
        each = "" if self.per_node is None else f", {self.per_node} a node"
        return f"{len(self.ranks)} ranks{each}"


def divide(nodes: Sequence[Hashable], wanted: Sequence[int | None]) -> tuple[list[Division], list[str]]:
    """The groups of ranks to measure, and lines on those that are left out.

    Args:
        nodes: what names each rank's node, by rank.
        wanted: ranks of each node; None for all.

    Raises:
        RequestError: no group is left.
    """
    members: dict[Hashable, list[int]] = {}
    for rank, node in enumerate(nodes):
        members.setdefault(node, []).append(rank)
    found: dict[tuple[int, ...], Division] = {}
    notes = []
    for number in wanted:
        chosen = [ranks[:number] for ranks in members.values()]
        ranks = tuple(sorted(rank for some in chosen for rank in some))
        counts = {len(some) for some in chosen}
        if len(ranks) < 2:
            notes.append(f"--ranks-per-node {number}: one node, so that is one rank alone: left out")
        elif ranks in found:
            notes.append(f"--ranks-per-node {number or 'all'}: the same ranks as before: left out")
        else:
            found[ranks] = Division(ranks, counts.pop() if len(counts) == 1 else None)
    if not found:
        raise RequestError(f"{'; '.join(notes)}; ask for 2 or more, or for all, or start on more nodes")
    return list(found.values()), notes


def nodes_of(group: Group) -> list[Hashable]:
    """What names each rank's node, by rank. Collective: every rank must call this.

    The launcher's index of it, as two hosts may have one name; else the host's name.
    """
    cards = group.comm.allgather([group.world.node_rank, group.world.hostname])
    told = all(node_rank is not None for node_rank, _ in cards)
    return [node_rank if told else hostname for node_rank, hostname in cards]


def gather_members(division: Division, group: Group, timeout_s: float) -> Members | None:
    """This rank among the others of a division; None where it is none of them. `timeout_s`: of a collective.

    Collective: every rank must call this.
    """
    world = group.world
    whole = len(division.ranks) == world.world_size
    made = dist.group.WORLD if whole else dist.new_group(list(division.ranks), timedelta(seconds=timeout_s))
    if world.rank not in division.ranks:
        return None
    assert isinstance(made, dist.ProcessGroup)
    return Members(made, division.ranks, division.ranks.index(world.rank), group.device)
