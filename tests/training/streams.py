"""Streams of tensors that are already in memory, for tests of saving."""

from __future__ import annotations

from torch import Tensor

from ddp_hpc.training.snapshots.host_buffer import Stream, specs_of


def stream_of(tensors: dict[str, Tensor]) -> Stream:
    return Stream(specs_of(tensors), tensors.items())
