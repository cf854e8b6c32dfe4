"""Creates the strategy that --strategy and --mesh select."""

from __future__ import annotations

from importlib import import_module
from typing import cast

import torch.distributed as dist
from torch import nn

from ddp_hpc.training.input.host_memory import return_free_memory
from ddp_hpc.training.optimization.config import OptimizationConfig
from ddp_hpc.training.optimization.precision import Precision, check_bf16
from ddp_hpc.training.parallel.base import Strategy
from ddp_hpc.training.parallel.config import ParallelConfig
from ddp_hpc.training.parallel.device_mesh import Mesh, find_mesh
from ddp_hpc.training.process_group.group import Group
from ddp_hpc.training.snapshots.training_state import live_tensors
from ddp_hpc.training.tasks.task import Task

__all__ = ["Strategy", "make_strategy"]

# The module and the class of each strategy. With --mesh, the first of pp, fsdp and tp that divides the model
# selects the strategy, and otherwise ddp.
_CLASSES = {
    "single": ("base", "Single"),
    "dataparallel": ("torch_data_parallel", "DataParallel"),
    "ddp": ("ddp", "Ddp"),
    "zero": ("ddp", "Zero"),
    "fsdp": ("fsdp", "Fsdp"),
    "tp": ("tensor_parallel", "TensorParallel"),
    "pp": ("pipeline", "Pipeline"),
}


def make_strategy(
    task: Task,
    group: Group,
    config: ParallelConfig,
    optimization: OptimizationConfig,
    *,
    computes_loss: bool = True,
) -> Strategy:
    """Distributes the task's model as --strategy and --mesh request. Collective: every rank must call this.

    Without `computes_loss`, the wrapped model has the inputs and the outputs of the task's model.

    Raises:
        RequestError: the strategy does not support this model, device or number of ranks.
    """
    mesh = find_mesh(config, group)
    check_bf16(optimization, group.device)
    precision = Precision(optimization.amp, group.device)
    if group.backend != "none":
        _broadcast_parameters(task.model, group)
    kind = _kind_of(mesh, config.strategy)
    strategy = kind(task, group, config, optimization, precision, mesh, computes_loss)
    if mesh.divides_model:
        return_free_memory()  # the other ranks' parts of the model
    return strategy


def _broadcast_parameters(model: nn.Module, group: Group) -> None:
    """Copies rank 0's parameters and buffers to all ranks, so that no strategy has to do this."""
    for tensor in live_tensors(model).values():
        sent = tensor.detach().to(group.device).contiguous()
        dist.broadcast(sent, src=0)
        tensor.detach().copy_(sent)


def _kind_of(mesh: Mesh, strategy: str) -> type[Strategy]:
    """Returns the strategy's class. Imports only its module, because some imports take a second."""
    if mesh.is_single:
        name = strategy if strategy == "dataparallel" else "single"
    else:
        name = next((name for name in ("pp", "fsdp", "tp") if mesh.has(name)), strategy)
    module, kind = _CLASSES[name]
    return cast(type[Strategy], getattr(import_module(f"ddp_hpc.training.parallel.{module}"), kind))
