"""Computes the norm of the gradients before the update, and clips them.

Gradients can be plain tensors, tensors that are sharded over ranks (DTensors), or both. torch's foreach
functions do not accept DTensors, so they are called on the local shards.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_hpc.training.snapshots.dtensor_shards import is_sharded, local_shard

_BUCKET_BYTES = 25 * 2**20  # the default bucket size of DDP


def global_norm(
    parameters: Iterable[nn.Parameter],
    across: dist.ProcessGroup | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """Returns the norm of all gradients together, as a float64 scalar tensor.

    `across` is a group of ranks that hold different parameters. A rank without gradients, such as a frozen
    stage, contributes a zero on `device`, because NCCL cannot send a tensor that is on the CPU.
    Collective if a gradient is sharded or `across` is given: every rank must call this.
    """
    layouts: dict[Any, list[Tensor]] = {}
    for grad in _gradients(parameters):
        layout = (grad.device_mesh, grad.placements) if is_sharded(grad) else None  # type: ignore[attr-defined]
        layouts.setdefault(layout, []).append(local_shard(grad))
    squares = []
    for layout, grads in layouts.items():
        halves = [grad for grad in grads if grad.dtype == torch.bfloat16]
        if halves:  # otherwise, torch rounds their norms to bfloat16
            others = [grad for grad in grads if grad.dtype != torch.bfloat16]
            grads = [*others, *torch._foreach_norm(halves, 2.0, dtype=torch.float32)]
        square = torch.nn.utils.get_total_norm(grads, foreach=True).double() ** 2
        if layout is not None:
            mesh, placements = layout
            # Move the value to the device that the backend of the group supports.
            square = square.to(mesh.device_type)
            for dim, placement in enumerate(placements):
                if not placement.is_replicate():
                    dist.all_reduce(square, group=mesh.get_group(dim))
        squares.append(square)
    total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64, device=device)
    if across is not None:
        dist.all_reduce(total, group=across)
    return total.sqrt()


def limit_norm(parameters: Iterable[nn.Parameter], norm: Tensor, max_norm: float) -> None:
    """Scales all gradients, whose norm is `norm`, so that their norm is at most `max_norm`."""
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for grad in map(local_shard, _gradients(parameters)):
        alike.setdefault((grad.device, grad.dtype), []).append(grad)
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for (device, dtype), grads in alike.items():
        torch._foreach_mul_(grads, factor.to(device, dtype))


def _gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def mean_over(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Averages the gradients over the ranks of a group, in flat buckets. Collective over the group."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    for parameter in trained:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    average(map(local_shard, _gradients(trained)), group)


def average(tensors: Iterable[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Averages the tensors over the ranks of a group (None: all ranks), in place and in flat buckets.

    Collective over the group.
    """
    size = dist.get_world_size(group)
    bucket: list[Tensor] = []
    num_bytes = 0
    for tensor in tensors:
        if bucket and (num_bytes + tensor.nbytes > _BUCKET_BYTES or tensor.dtype != bucket[0].dtype):
            _reduce(bucket, group, size)
            bucket, num_bytes = [], 0
        bucket.append(tensor)
        num_bytes += tensor.nbytes
    if bucket:
        _reduce(bucket, group, size)


def _reduce(tensors: list[Tensor], group: dist.ProcessGroup | None, size: int) -> None:
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.all_reduce(flat.div_(size), group=group)
    means = torch.split(flat, [tensor.numel() for tensor in tensors])
    torch._foreach_copy_(tensors, [mean.view_as(tensor) for mean, tensor in zip(means, tensors, strict=True)])
