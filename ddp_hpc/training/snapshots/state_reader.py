"""Reads the tensors of a snapshot on all ranks: each rank its shards, or rank 0 for all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_hpc.discovery.rank_communication import first_text
from ddp_hpc.training.process_group.group import Group
from ddp_hpc.training.snapshots.dtensor_shards import (
    from_shard,
    is_sharded,
    local_shard,
    place_of_shard,
)
from ddp_hpc.training.snapshots.stored_tensors import StoredTensors
from ddp_hpc.training.snapshots.verified_file import DamagedSnapshotError


class StateReader:
    """Reads the tensors of one snapshot on all ranks.

    A damaged part is replaced by zeros, so that no rank waits for another; `agree` then raises the error.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._problem = ""

    def tensors(
        self, saved: StoredTensors, needed: Mapping[str, Tensor | None], *, differs_between_ranks: bool
    ) -> Iterator[tuple[str, Tensor]]:
        """Yields the needed tensors on the device. Collective: every rank must iterate over all of them.

        A sharded tensor in `needed` describes the shard that this rank needs; otherwise, the rank needs
        the whole tensor. `differs_between_ranks` means that ranks need different tensors.
        """
        for name, (shape, _) in saved.specs.items():
            if name not in needed:
                continue
            like = needed[name]
            if like is not None and is_sharded(like) and tuple(like.shape) == shape:
                place, shard = place_of_shard(like), local_shard(like)
                values = self._read(saved, name, place.offset, tuple(shard.shape))
                yield name, from_shard(like, values.to(shard.device))
            elif differs_between_ranks:
                yield name, self._read_whole(saved, name)
            else:
                yield name, self._broadcast(saved, name)
        saved.close()

    def generator_state(self, saved: StoredTensors, name: str) -> Tensor | None:
        """Returns this rank's row of a tensor with one row per rank; None if it is from other ranks.

        Collective: every rank must call this.
        """
        rank, world_size = self._group.world.rank, self._group.world.world_size
        shape, _ = saved.specs.get(name, ((), torch.uint8))
        if len(shape) != 2:
            return None
        # Rows that no rank needs are read too, so that damage is found.
        rows = [self._read(saved, name, (row, 0), (1, shape[1])) for row in range(rank, shape[0], world_size)]
        saved.close()
        return rows[0][0] if shape[0] == world_size else None

    def agree(self) -> None:
        """Raises an error on all ranks if any rank found damage. Collective: every rank must call this.

        Raises:
            DamagedSnapshotError: with the message of the first rank.
        """
        if problem := self._group.comm.combine(self._problem, first_text):
            raise DamagedSnapshotError(problem)

    def _broadcast(self, saved: StoredTensors, name: str) -> Tensor:
        """Returns a whole tensor, which only rank 0 reads. Collective."""
        shape, dtype = saved.specs[name]
        if self._group.world.rank == 0:
            tensor = self._read_whole(saved, name)
        else:
            tensor = torch.empty(shape, dtype=dtype, device=self._group.device)
        if self._group.backend != "none":
            # As bytes, because NCCL and gloo do not support all data types, such as int16.
            dist.broadcast(tensor.reshape(-1).view(torch.uint8), src=0)
        return tensor

    def _read_whole(self, saved: StoredTensors, name: str) -> Tensor:
        shape, _ = saved.specs[name]
        return self._read(saved, name, (0,) * len(shape), shape).to(self._group.device)

    def _read(
        self, saved: StoredTensors, name: str, offset: tuple[int, ...], shape: tuple[int, ...]
    ) -> Tensor:
        try:
            return saved.read(name, offset, shape)
        except DamagedSnapshotError as error:
            self._problem = self._problem or str(error)
            return torch.zeros(shape, dtype=saved.specs[name][1])
