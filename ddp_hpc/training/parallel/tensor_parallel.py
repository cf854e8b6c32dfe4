"""Tensor parallel: each layer's matrices are split over ranks, which all see the same samples."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ddp_hpc.errors import RequestError
from ddp_hpc.training.optimization.gradients import mean_over
from ddp_hpc.training.parallel.base import Strategy
from ddp_hpc.training.parallel.device_mesh import Mesh
from ddp_hpc.training.snapshots.training_state import TrainingState
from ddp_hpc.training.tasks.task import Task


def split_layers(task: Task, mesh: Mesh, *, compiles: bool) -> None:
    """Splits the layers that the task's plan names, in place. Collective over the grid.

    Raises:
        RequestError: the task has no plan, or one that does not fit.
    """
    if compiles:
        raise RequestError(
            f"--compile with tp={mesh.sizes['tp']}: torch 2.13's compiler does not get through layers that "
            "are split so; leave one of them out"
        )
    if task.tensor_parallel is None:
        raise RequestError(
            f"tp={mesh.sizes['tp']}: the task of {type(task.model).__name__} has no `tensor_parallel` plan, "
            "which says how each layer is split; give it one, or use --strategy fsdp, which needs none"
        )
    plan = dict(task.tensor_parallel(task.model))
    modules = dict(task.model.named_modules())
    for name in plan:
        if name not in modules:
            raise RequestError(f"the `tensor_parallel` plan names {name}, which the model does not have")
        _check_splits(name, modules[name], plan[name], mesh.sizes["tp"])
    # Its fast path in evaluation reads the layers' parameters by itself.
    torch.backends.mha.set_fastpath_enabled(False)
    parallelize_module(task.model, mesh.sub("tp"), plan)


def _check_splits(name: str, module: nn.Module, style: object, num_ranks: int) -> None:
    """Layers meet in what they give each other: parts of different sizes would not fit."""
    axis = 0 if isinstance(style, ColwiseParallel) else 1 if isinstance(style, RowwiseParallel) else None
    if axis is None or not isinstance(module, nn.Linear):
        return
    size = module.weight.shape[axis]
    if size % num_ranks:
        raise RequestError(
            f"{name} has {size} {('outputs', 'inputs')[axis]}, which {num_ranks} ranks cannot share evenly: "
            "choose a number of tp ranks that divides them"
        )


class TensorParallel(Strategy):
    """Split layers, and replicas of them where there are more ranks.

    Replicas average their gradients after the backward pass, not during it as DDP does, which
    takes no parameters that are spread: with many replicas use fsdp in the place of dp.
    """

    forward_is_collective = True
    compiles_blocks = True

    def _prepare(self) -> nn.Module:
        model = self.bare.to(self.group.device)
        split_layers(self.task, self.mesh, compiles=self.optimization.compile is not None)
        return model

    def finish_gradients(self) -> None:
        """The mean over the replicas."""
        if self.mesh.has("dp"):
            mean_over(self.parameters(), self.mesh.sub("dp").get_group())

    def state(self) -> TrainingState:
        """Rank 0 puts it together."""
        return replace(super().state(), leads=self.group.world.rank == 0)
