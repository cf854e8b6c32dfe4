"""Snapshots for tests: the writers of all ranks in one process, with a real store between them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddp_hpc.training.snapshots.host_buffer import Place, Stream, specs_of
from ddp_hpc.training.snapshots.joint_save import JointSave
from ddp_hpc.training.snapshots.snapshot_directory import SnapshotDirectory, SnapshotWriter
from ddp_hpc.training.snapshots.snapshot_files import snapshot_name
from tests.stores import store_in_thread

from .streams import stream_of


@dataclass
class Ranks:
    """One writer per rank, and the messages of all of them."""

    writers: list[SnapshotWriter] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    @property
    def first(self) -> SnapshotDirectory:
        assert isinstance(self.writers[0], SnapshotDirectory)
        return self.writers[0]

    def save(
        self,
        step: int,
        model: Mapping[str, Tensor],
        training: Mapping[str, Tensor],
        absent: tuple[int, ...] = (),
    ) -> None:
        """Saves the tensors, of which each rank holds some rows. The ranks in `absent` do not write."""
        for rank, writer in enumerate(self.writers):
            if rank not in absent:
                streams = (stream_of_rank(tensors, rank, len(self.writers)) for tensors in (model, training))
                writer.save(step, {"position": {"step": step}}, *streams)
        for writer in self.writers:
            writer.wait()


def stream_of_rank(tensors: Mapping[str, Tensor], rank: int, num_ranks: int) -> Stream:
    """The rows of a rank, as torch.chunk divides them. Rank 0 holds tensors without rows."""
    shards, places = {}, {}
    for name, tensor in tensors.items():
        rows = torch.arange(len(tensor)).chunk(num_ranks) if tensor.dim() else ()
        if rank < len(rows) and tensor.numel():
            shards[name] = tensor[rows[rank]]
            places[name] = Place(tuple(tensor.shape), (int(rows[rank][0]), *[0] * (tensor.dim() - 1)))
        elif rank == 0:
            shards[name] = tensor
    return Stream(specs_of(shards), shards.items(), places=places)


@contextmanager
def ranks_in(directory: Path, num_ranks: int, limit_s: float = 30.0, keep: int = 3) -> Iterator[Ranks]:
    """The writers of a run in `directory`."""
    ranks = Ranks()
    with store_in_thread() as served:
        for rank in range(num_ranks):
            joint = JointSave(served.client(), rank, num_ranks, limit_s, "here")
            if rank:
                ranks.writers.append(SnapshotWriter(directory, ranks.said.append, joint))
            else:
                ranks.writers.append(SnapshotDirectory(directory, keep, ranks.said.append, lambda _: None))
                ranks.writers[0].joint = joint
        yield ranks
        for writer in ranks.writers:
            writer.close()


def saved_whole(
    directory: Path,
    step: int,
    model: Mapping[str, Tensor],
    training: Mapping[str, Tensor],
    about: Mapping[str, Any] | None = None,
) -> Path:
    """Saves whole tensors, as rank 0 does alone."""
    said: list[str] = []
    writer = SnapshotDirectory(directory, 100, said.append, lambda _: None)
    about = {"position": {"step": step}} if about is None else about
    writer.save(step, about, stream_of(model), stream_of(training))
    writer.close()
    assert said == []
    return directory / snapshot_name(step)
