"""Tensors that may be sharded over ranks (DTensor), and their conversion to whole tensors and back."""

from __future__ import annotations

from torch import Tensor


def is_sharded(tensor: Tensor) -> bool:
    """Returns whether a tensor is a DTensor, so that this rank holds only a shard."""
    return hasattr(tensor, "full_tensor")


def local_shard(tensor: Tensor) -> Tensor:
    """Returns this rank's shard of a DTensor, or the tensor itself if it is not sharded."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def whole_tensor(tensor: Tensor) -> Tensor:
    """Returns the whole tensor. Collective if it is sharded."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def shard_like(parameter: Tensor, value: Tensor) -> Tensor:
    """Shards `value` like the parameter; a value of another shape, such as a step count, is not sharded."""
    if not is_sharded(parameter) or value.shape != parameter.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    # Every rank has the whole tensor, so nothing is sent. The shard is copied, because with torch 2.8 it is a
    # view, which would keep the whole tensor in memory.
    return distribute_tensor(
        value.detach(),
        parameter.device_mesh,  # type: ignore[attr-defined]  # of a DTensor
        parameter.placements,  # type: ignore[attr-defined]
        src_data_rank=None,
    ).clone()
