"""Gradients before the update: their norm, their limit, and whether they are numbers.

They may be plain tensors, or parts of ones that are spread over ranks (DTensors), or both.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_hpc.training.state import is_spread

_BUCKET_BYTES = 25 * 2**20  # DDP's default


def global_norm(parameters: Iterable[nn.Parameter], across: dist.ProcessGroup | None = None) -> Tensor:
    """The norm of all gradients as one vector, a scalar; `across`: ranks with other parameters count too.

    Collective where anything is spread: every rank must call this.
    """
    found: dict[object, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            grad = parameter.grad
            key = (grad.device_mesh, grad.placements) if is_spread(grad) else None  # type: ignore[attr-defined]
            found.setdefault(key, []).append(grad)
    squares = []
    for grads in found.values():
        norm = torch.nn.utils.get_total_norm(grads)
        whole: Tensor = norm.full_tensor() if is_spread(norm) else norm  # type: ignore[attr-defined]
        squares.append(whole.double() ** 2)
    total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64)
    if across is not None:
        dist.all_reduce(total, group=across)
    return total.sqrt()


def limit_norm(parameters: Iterable[nn.Parameter], norm: Tensor, max_norm: float) -> None:
    """Scales all gradients so that their norm, which is given, is at most `max_norm`."""
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    locals_ = [grad.to_local() if is_spread(grad) else grad for grad in grads]  # type: ignore[attr-defined]
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for grad in locals_:
        grad.mul_(factor.to(grad.device, grad.dtype))


def mean_over(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Averages the gradients over the ranks of a group, in flat buckets. Collective in that group."""
    size = dist.get_world_size(group)
    bucket: list[Tensor] = []
    num_bytes = 0
    for parameter in parameters:
        if not parameter.requires_grad:
            continue
        grad = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        parameter.grad = grad
        local = grad.to_local() if is_spread(grad) else grad  # type: ignore[attr-defined]
        if bucket and (num_bytes + local.nbytes > _BUCKET_BYTES or local.dtype != bucket[0].dtype):
            _reduce(bucket, group, size)
            bucket, num_bytes = [], 0
        bucket.append(local)
        num_bytes += local.nbytes
    if bucket:
        _reduce(bucket, group, size)


def _reduce(tensors: list[Tensor], group: dist.ProcessGroup, size: int) -> None:
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.all_reduce(flat.div_(size), group=group)
    begin = 0
    for tensor in tensors:
        tensor.copy_(flat[begin : begin + tensor.numel()].view_as(tensor))
        begin += tensor.numel()
