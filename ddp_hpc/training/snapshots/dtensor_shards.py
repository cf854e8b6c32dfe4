"""Tensors that may be sharded over ranks (DTensor), and their conversion to whole tensors and back."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ddp_hpc.training.snapshots.host_buffer import Place


def is_sharded(tensor: Tensor) -> bool:
    """Returns whether a tensor is a DTensor, so that this rank holds only a shard."""
    return hasattr(tensor, "full_tensor")


def local_shard(tensor: Tensor) -> Tensor:
    """Returns this rank's shard of a DTensor, or the tensor itself if it is not sharded."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def place_of_shard(tensor: Tensor) -> Place:
    """Returns the place of this rank's shard in the whole tensor."""
    shape = tuple(tensor.shape)
    if not is_sharded(tensor):
        return Place(shape, (0,) * len(shape))
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]  # of a DTensor
    # torch.distributed.checkpoint uses this function, too; it also handles FSDP together with TP.
    _, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    return Place(shape, tuple(offset))


def is_first_copy(tensor: Tensor, rank: int, at: Mapping[str, int] | None) -> bool:
    """Returns whether this rank is the first of those that hold the same shard.

    `at` contains the rank's index along each dimension of the device mesh in which ranks hold copies of
    tensors that are not sharded. It is None if each sharded tensor is sharded over all ranks.
    """
    if not is_sharded(tensor):
        return rank == 0 if at is None else not any(at.values())
    mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]  # of a DTensor
    is_empty = not tensor.numel()
    for index, placement in zip(mesh.get_coordinate(), placements, strict=True):
        if index and (placement.is_replicate() or is_empty):
            return False
    return not any(index for name, index in (at or {}).items() if name not in mesh.mesh_dim_names)


def from_shard(like: Tensor, shard: Tensor) -> Tensor:
    """Returns a DTensor with this rank's shard, which is distributed like `like`."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        shard,
        like.device_mesh,  # type: ignore[attr-defined]  # of a DTensor
        like.placements,  # type: ignore[attr-defined]
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def whole_tensor(tensor: Tensor) -> Tensor:
    """Returns the whole tensor. Collective if it is sharded."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def shard_like(parameter: Tensor, value: Tensor) -> Tensor:
    """Shards `value` like the parameter; a value of another shape, such as a step count, is not sharded."""
    if not is_sharded(parameter) or is_sharded(value) or value.shape != parameter.shape:
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
