"""Collectives of gloo over the TCPStore that GPU backends use: of all ranks, and of groups within them."""

import torch
import torch.distributed as dist

import ddp_hpc
from ddp_hpc.training.process_group import group_store

group_store._WITH_RANKS_STORE = ()


def sum_of(number: float, group: dist.ProcessGroup | None = None) -> float:
    values = torch.tensor([float(number)])
    dist.all_reduce(values, group=group)
    return values.item()


def innermost(store: dist.Store) -> dist.Store:
    return innermost(store.underlying_store) if isinstance(store, dist.PrefixStore) else store


with ddp_hpc.distributed(device="cpu") as world:
    rank, size = world.rank, world.world_size
    assert isinstance(innermost(dist.distributed_c10d._get_default_store()), dist.TCPStore)
    assert sum_of(rank) == sum(range(size))
    halves = range(size // 2), range(size // 2, size)
    groups = [dist.new_group(list(half)) for half in halves]
    half = rank // (size // 2)
    assert sum_of(rank, groups[half]) == sum(halves[half])
    mesh = dist.init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("nodes", "ranks"))
    assert sum_of(rank, mesh.get_group("ranks")) == sum(halves[half])
    # Splitting a group of NCCL clones the store.
    cloned = innermost(dist.distributed_c10d._get_default_store()).clone()
    cloned.set(f"rank {rank}", "")
    cloned.wait([f"rank {other}" for other in range(size)])
    dist.barrier()
    world.say("done")
