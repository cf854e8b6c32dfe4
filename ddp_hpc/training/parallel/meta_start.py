"""Gives a model on the meta device memory on this rank, for the rank's own shards or stage only."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_hpc.training.parallel.device_mesh import Mesh
from ddp_hpc.training.snapshots.dtensor_shards import is_sharded, local_shard, place_of_shard
from ddp_hpc.training.tasks.initial_values import InitialValues, convert, named_tensors


def allocate(module: nn.Module, device: torch.device, *, offload: bool = False) -> None:
    """Allocates the parameters and buffers of `module` that have no memory, and moves the others.

    With `offload`, parameters are allocated on the CPU.
    """

    def allocated(tensor: Tensor) -> Tensor:
        to = torch.device("cpu") if offload and isinstance(tensor, nn.Parameter) else device
        return torch.empty_like(tensor, device=to) if tensor.is_meta else tensor.to(to)

    convert(module, allocated)


def fill(model: nn.Module, initial: InitialValues, mesh: Mesh, device: torch.device) -> None:
    """Computes the initial values of the tensors that have memory. Collective: every rank must call this.

    Each rank computes one tensor at a time on the CPU, and copies its own shard.
    """
    done = set[int]()
    for name, tensor in named_tensors(model).items():
        if tensor.is_meta or id(tensor) in done or name not in initial.recipes:
            continue
        done.add(id(tensor))
        shard, offset = local_shard(tensor.detach()), place_of_shard(tensor).offset
        if shard.numel():
            own = tuple(slice(begin, begin + size) for begin, size in zip(offset, shard.shape, strict=True))
            shard.copy_(initial.values(name)[own])
            _copy_to_replicas(tensor, shard, mesh, device)
    initial.release()


def _copy_to_replicas(tensor: Tensor, shard: Tensor, mesh: Mesh, device: torch.device) -> None:
    """Copies a shard to the other ranks that hold it, because other CPUs can round differently."""
    sharded_by: set[str] = set()
    if is_sharded(tensor):
        names = tensor.device_mesh.mesh_dim_names  # type: ignore[attr-defined]  # of a DTensor
        placements = tensor.placements  # type: ignore[attr-defined]
        sharded_by = {
            name for name, placement in zip(names, placements, strict=True) if not placement.is_replicate()
        }
    for name in mesh.sizes:
        if name != "pp" and name not in sharded_by:
            sent = shard.to(device).contiguous()
            dist.broadcast(sent, group=mesh.sub(name).get_group(), group_src=0)
            shard.copy_(sent)
