"""The base class of all strategies, and the simplest strategy: one process with the whole model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ddp_hpc.base.errors import RequestError
from ddp_hpc.base.option_names import named
from ddp_hpc.training.optimization.config import OptimizationConfig
from ddp_hpc.training.optimization.gradients import global_norm, limit_norm
from ddp_hpc.training.optimization.optimizers import optimizer_class, optimizer_options, parameter_groups
from ddp_hpc.training.optimization.precision import Precision
from ddp_hpc.training.optimization.torch_compile import compile_modules
from ddp_hpc.training.parallel.config import ParallelConfig
from ddp_hpc.training.parallel.device_mesh import Mesh
from ddp_hpc.training.parallel.replica import Replica
from ddp_hpc.training.process_group.group import Group
from ddp_hpc.training.snapshots.dtensor_shards import is_sharded, local_shard
from ddp_hpc.training.snapshots.training_state import TrainingState, plain_state
from ddp_hpc.training.tasks.task import Task
from ddp_hpc.training.telemetry.trace_annotations import annotated

At = Callable[[str], None]


@dataclass(eq=False)
class Strategy:
    """Base class of the strategies: holds the wrapped model and its optimizer on each rank.

    A subclass wraps the model in `_prepare`, and overrides the methods that differ. All methods are
    collective: every rank must call them.

    Raises:
        RequestError: on construction, if the strategy does not support the model, device or number of ranks.
    """

    task: Task
    group: Group
    config: ParallelConfig
    optimization: OptimizationConfig
    precision: Precision
    mesh: Mesh
    computes_loss: bool = True
    """Whether a step computes the loss, and not a script that calls the wrapped model."""

    forward_is_collective = False
    """Whether ranks wait for each other in a forward pass, so that all must run the same number of passes."""
    eager_steps = 3
    """With --cuda-graph, the number of steps that run before one is captured. They allocate what is left to
    allocate, such as the state of the optimizer.
    """
    calls_task_model = True
    """Whether a step calls the task's model, and not stages or copies of it."""

    def __post_init__(self) -> None:
        self.bare = self.task.model
        """The unwrapped model, which defines the names of the tensors."""
        self.model = self._prepare()
        """The wrapped model, which a step calls."""
        # A step uses this list several times, and walking through all modules takes long.
        self._parameters = list(self.model.parameters())
        self.optimizer = self._make_optimizer(self.optimization.scaled_lr(self.mesh.data_size))

    def _prepare(self) -> nn.Module:
        raise NotImplementedError

    def _make_optimizer(self, lr: float) -> torch.optim.Optimizer:
        config, device = self.optimization, self.group.device
        parameters = self.parameters()
        options = optimizer_options(config, device, lr, is_sharded=any(map(is_sharded, parameters)))
        return optimizer_class(config)(parameter_groups(parameters, config.weight_decay), **options)

    def parameters(self) -> list[nn.Parameter]:
        """Returns the parameters for which this rank computes gradients."""
        return self._parameters

    def state(self) -> TrainingState:
        """Returns the training state that snapshots save."""
        # The stages of a pipeline hold different tensors, not copies.
        at = {name: index for name, index in self.mesh.at.items() if name != "pp"}
        return plain_state(self.bare, self.optimizer, self.group, self.precision.scaler, at)

    def sync(self, last: bool) -> AbstractContextManager[Any]:
        """Returns a context that communicates gradients only for the last micro-batch of a step."""
        del last
        return nullcontext()

    def micro_batch(self, src: Tensor, tgt: Tensor, factor: float, last: bool, at: At) -> Tensor:
        """Runs forward and backward; returns the mean loss on the device. Calls `at` before each phase."""
        with self.sync(last):
            at("forward")
            with annotated("forward"):
                loss = self.loss(src, tgt)
            at("backward")
            # A full batch has the factor 1.0, and then the loss is not multiplied, as in a plain loop.
            with annotated("backward"):
                self.precision.backward(loss if factor == 1.0 else loss * factor)
        return loss.detach()

    def as_in_a_step(self) -> AbstractContextManager[Any]:
        """Returns a context in which the bare model is compiled like the wrapped model in a step."""
        return nullcontext()

    def loss(self, src: Tensor, tgt: Tensor) -> Tensor:
        """Returns the mean loss of the wrapped model."""
        with self.precision.autocast():
            return self._loss_of(self.model, src, tgt)

    def local_loss(self, src: Tensor, tgt: Tensor) -> Tensor:
        """Returns the mean loss, without collectives unless `forward_is_collective`."""
        return self.loss(src, tgt)

    @property
    def fuses_loss(self) -> bool:
        """Whether the model computes its loss without its complete output (`Task.fused_loss`)."""
        return (
            self.task.fused_loss is not None and self.calls_task_model and self.config.devices_per_rank == 1
        )

    def _loss_of(self, model: nn.Module, src: Tensor, tgt: Tensor) -> Tensor:
        if self.fuses_loss:
            assert self.task.fused_loss is not None
            return self.task.fused_loss(model, src, tgt)
        return self.task.loss(self.task.forward(model, src, tgt), tgt)

    def finish_gradients(self) -> None:
        """Reduces the gradients after the last micro-batch, if this was not part of its backward pass."""

    def after_update(self, step: int) -> None:
        """Called after each step (the first is 1), also if --amp fp16 skipped its update on this rank."""

    def equalize(self) -> None:
        """Makes the parameters and the optimizer state of all replicas equal, if they can differ.

        Called before a snapshot, which contains the replica of rank 0, before an evaluation, and after the
        last step.
        """

    def gradient_norm(self) -> Tensor:
        """Returns the norm of all gradients of the whole model as a scalar tensor.

        Whether it is finite must be the same on all ranks: with --check-gradients, all of them stop.
        """
        return global_norm(self.parameters())

    def limit_gradients(self, norm: Tensor, max_norm: float) -> None:
        """Scales the gradients, whose norm is `norm`, so that their norm is at most `max_norm`."""
        limit_norm(self.parameters(), norm, max_norm)

    def output(self, src: Tensor, tgt: Tensor) -> Any:
        """Returns the model's output, computed without gradients; None on ranks that do not receive it."""
        with self.precision.autocast():
            return self.task.forward(self.model, src, tgt)

    def prepare_restore(self, src: Tensor, tgt: Tensor) -> None:
        """Prepares the strategy for a restore, so that it behaves as if it had already run steps."""

    def state_bytes(self) -> int:
        """Returns the size in bytes of the parameters, gradients and optimizer state on this rank."""
        tensors: list[Tensor] = []
        for parameter in self.parameters():
            tensors += [parameter, *([] if parameter.grad is None else [parameter.grad])]
        for values in self._local_optimizer().state.values():
            tensors += [value for value in values.values() if isinstance(value, Tensor)]
        return sum(local_shard(tensor).nbytes for tensor in tensors)

    def _local_optimizer(self) -> torch.optim.Optimizer:
        return self.optimizer

    def _unsupported(self, reason: str, instead: str) -> RequestError:
        return RequestError(f"{named('strategy')} {self.config.strategy}: {reason}; {instead}")


class WithLoss(nn.Module):
    """A model together with its loss, so that both can be compiled together."""

    def __init__(self, model: nn.Module, loss_of: Callable[[nn.Module, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.model = model
        self._loss_of = loss_of

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        """Returns the mean loss of a batch."""
        return self._loss_of(self.model, src, tgt)


class WholeModel(Strategy):
    """Base class of the strategies that call model and loss as one module on each rank."""

    with_loss: WithLoss

    def _with_loss(self, model: nn.Module) -> nn.Module:
        if not self.computes_loss:
            return model
        self.with_loss = WithLoss(model, self._loss_of)
        if self.optimization.compile is not None:
            # An evaluation with metrics calls the model without the loss.
            compile_modules([model, self.with_loss], self.optimization.compile)
        return self.with_loss

    def loss(self, src: Tensor, tgt: Tensor) -> Tensor:
        """Returns the mean loss of the wrapped model."""
        with self.precision.autocast():
            loss: Tensor = self.model(src, tgt)
            return loss

    def local_loss(self, src: Tensor, tgt: Tensor) -> Tensor:
        """Returns the mean loss, without collectives."""
        with self.precision.autocast():
            loss: Tensor = self.with_loss(src, tgt)
            return loss

    def output(self, src: Tensor, tgt: Tensor) -> Any:
        """Returns the model's output, computed without gradients and without collectives."""
        with self.precision.autocast():
            return self.task.forward(self.with_loss.model, src, tgt)


class Single(WholeModel):
    """One process with the whole model, on one device or several."""

    def _prepare(self) -> nn.Module:
        if self.config.devices_per_rank > 1:
            replica = Replica(self.task, self.group, self.config.devices_per_rank)
            return self._with_loss(replica)
        self.bare.to(self.group.device)
        return self._with_loss(self.bare)
