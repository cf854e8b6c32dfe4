"""Tensor parallelism: the matrices of each layer are split over ranks that use the same samples."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ddp_hpc.base.errors import RequestError
from ddp_hpc.training.optimization.gradients import mean_over
from ddp_hpc.training.parallel.base import Strategy
from ddp_hpc.training.parallel.device_mesh import Mesh
from ddp_hpc.training.snapshots.dtensor_shards import is_sharded
from ddp_hpc.training.tasks.task import Task


def split_layers(task: Task, mesh: Mesh, *, compiles: bool) -> None:
    """Splits the layers that the task's tensor-parallel plan names, in place, onto the device. Collective.

    Raises:
        RequestError: the task has no plan, or the plan does not match the model.
    """
    if compiles:
        raise RequestError(
            f"--compile with tp={mesh.sizes['tp']}: torch 2.13 cannot compile tensor-parallel layers; "
            "remove one of them"
        )
    if task.tensor_parallel is None:
        raise RequestError(
            f"tp={mesh.sizes['tp']}: the task of {type(task.model).__name__} has no `tensor_parallel` plan, "
            "which defines how each layer is split; add a plan, or use --strategy fsdp, which does not "
            "require one"
        )
    plan = dict(task.tensor_parallel(task.model))
    modules = dict(task.model.named_modules())
    for name in plan:
        if name not in modules:
            raise RequestError(
                f"the `tensor_parallel` plan contains {name}, which does not exist in the model; use names "
                "from model.named_modules()"
            )
        _check_splits(name, modules[name], plan[name], mesh.sizes["tp"])
        _check_heads(name, modules, mesh.sizes["tp"])
    # The fast path of attention in evaluation would read the parameters directly.
    torch.backends.mha.set_fastpath_enabled(False)
    parallelize_module(task.model, mesh.sub("tp"), plan)


def move_whole_layers(model: nn.Module, device: torch.device) -> None:
    """Moves the layers that `split_layers` has not split to the device, in place."""
    for module in model.modules():
        if not any(map(is_sharded, module.parameters(recurse=False))):
            module._apply(lambda tensor: tensor.to(device), recurse=False)  # type: ignore[no-untyped-call]


def _check_splits(name: str, module: nn.Module, style: object, num_ranks: int) -> None:
    """Checks that split dimensions are divisible, because unequal shards would not match between layers."""
    axis = 0 if isinstance(style, ColwiseParallel) else 1 if isinstance(style, RowwiseParallel) else None
    if axis is None or not isinstance(module, nn.Linear):
        return
    size = module.weight.shape[axis]
    if size % num_ranks:
        raise RequestError(
            f"{name} has {size} {('outputs', 'inputs')[axis]}, which cannot be divided evenly among "
            f"{num_ranks} ranks; use a tp size that divides that number"
        )


def _check_heads(name: str, modules: Mapping[str, nn.Module], num_ranks: int) -> None:
    """Checks that a layer of an attention module, such as nn.MultiheadAttention, is split by whole heads."""
    attention = name.rpartition(".")[0]
    num_heads = getattr(modules[attention], "num_heads", None)
    if isinstance(num_heads, int) and num_heads % num_ranks:
        raise RequestError(
            f"{attention} has {num_heads} heads, which cannot be divided evenly among {num_ranks} ranks; "
            "use a tp size that divides that number"
        )


class TensorParallel(Strategy):
    """The strategy that splits layers over ranks, and replicates them if there are more ranks.

    Replicas average their gradients after the backward pass, and not during it as DDP does, because DDP does
    not support sharded parameters. With many replicas, use fsdp instead of dp.
    """

    forward_is_collective = True

    def _prepare(self) -> nn.Module:
        model, device = self.bare, self.group.device
        if self.optimization.amp == "fp16":
            raise self._unsupported(
                "the loss scaling of fp16 does not support sharded gradients", "use --amp bf16"
            )
        split_layers(self.task, self.mesh, compiles=self.optimization.compile is not None)
        move_whole_layers(model, device)
        return model

    def finish_gradients(self) -> None:
        """Averages the gradients over the replicas."""
        if self.mesh.has("dp"):
            mean_over(self.parameters(), self.mesh.sub("dp").get_group())
