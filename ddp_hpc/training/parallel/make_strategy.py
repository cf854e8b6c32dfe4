"""Creates the strategy that --strategy and --mesh select."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

from ddp_hpc.training.optimization.config import OptimizationConfig
from ddp_hpc.training.optimization.precision import Precision, check_bf16
from ddp_hpc.training.parallel.base import Single, Strategy
from ddp_hpc.training.parallel.config import ParallelConfig
from ddp_hpc.training.parallel.device_mesh import Mesh, find_mesh
from ddp_hpc.training.process_group.group import Group
from ddp_hpc.training.snapshots.training_state import live_tensors
from ddp_hpc.training.tasks.initial_values import InitialValues
from ddp_hpc.training.tasks.task import Task

__all__ = ["Strategy", "make_strategy"]


def make_strategy(
    task: Task,
    group: Group,
    config: ParallelConfig,
    optimization: OptimizationConfig,
    initial: InitialValues | None = None,
    *,
    computes_loss: bool = True,
) -> Strategy:
    """Distributes the task's model as --strategy and --mesh request. Collective: every rank must call this.

    If the model is on the meta device, `initial` computes its values. Without `computes_loss`, the wrapped
    model has the inputs and the outputs of the task's model.

    Raises:
        RequestError: the strategy does not support this model, device or number of ranks.
    """
    mesh = find_mesh(config, group)
    check_bf16(optimization, group.device)
    precision = Precision(optimization.amp, group.device)
    has_copies = optimization.param_dtype is not None and group.backend != "none"
    if initial is None and (mesh.divides_model or has_copies):
        _broadcast_parameters(task.model, group)
    kind = _kind_of(mesh, config.strategy)
    return kind(task, group, config, optimization, precision, mesh, initial, computes_loss)


def _broadcast_parameters(model: nn.Module, group: Group) -> None:
    """Copies rank 0's parameters and buffers to all ranks. DDP does this itself, but not for float32
    copies of parameters.
    """
    for tensor in live_tensors(model).values():
        sent = tensor.detach().to(group.device).contiguous()
        dist.broadcast(sent, src=0)
        tensor.detach().copy_(sent)


def _kind_of(mesh: Mesh, strategy: str) -> type[Strategy]:
    """Returns the strategy's class. Imports only its module, because some imports take a second."""
    if mesh.is_single:
        from ddp_hpc.training.parallel.torch_data_parallel import DataParallel

        return DataParallel if strategy == "dataparallel" else Single
    if mesh.has("pp"):
        from ddp_hpc.training.parallel.pipeline import Pipeline

        return Pipeline
    if mesh.has("fsdp"):
        from ddp_hpc.training.parallel.fsdp import Fsdp

        return Fsdp
    if mesh.has("tp"):
        from ddp_hpc.training.parallel.tensor_parallel import TensorParallel

        return TensorParallel
    from ddp_hpc.training.parallel.ddp import Ddp, Zero

    return Zero if strategy == "zero" else Ddp
