"""What every strategy does, and the simplest: one process with the whole model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from ddp_hpc.errors import RequestError
from ddp_hpc.training.optimization.compilation import compile_modules
from ddp_hpc.training.optimization.config import OptimizationConfig
from ddp_hpc.training.optimization.gradients import global_norm, limit_norm
from ddp_hpc.training.optimization.optimizers import optimizer_class, optimizer_options, parameter_groups
from ddp_hpc.training.optimization.precision import Precision
from ddp_hpc.training.parallel.config import ParallelConfig
from ddp_hpc.training.parallel.device_mesh import Mesh
from ddp_hpc.training.parallel.replica import Replica
from ddp_hpc.training.process_group.group import Group
from ddp_hpc.training.snapshots.training_state import TrainingState, is_spread, plain_state
from ddp_hpc.training.tasks.task import Task

At = Callable[[str], None]


class Strategy:
    """A model that this rank has a part in. Methods are collective: every rank must call them.

    A subclass wraps the model in `_prepare`, and changes what is different.

    Raises:
        RequestError: on construction: this model, device or number of ranks cannot be shared so.
    """

    forward_is_collective = False
    """Ranks wait for each other in a forward pass: all have to make as many."""
    compiles_blocks = False
    """The model's layers are compiled one by one, by `_prepare`, as ranks meet between them."""

    def __init__(
        self,
        task: Task,
        group: Group,
        config: ParallelConfig,
        optimization: OptimizationConfig,
        precision: Precision,
        mesh: Mesh,
    ) -> None:
        self.task, self.group, self.precision, self.mesh = task, group, precision, mesh
        self.config, self.optimization = config, optimization
        self.bare = task.model
        """Of which the tensors have their names."""
        if optimization.compile is not None and not self.compiles_blocks:
            compile_modules([self.bare], optimization.compile)
        self.model = self._prepare()
        """Which is called."""
        self.optimizer = self._make_optimizer(optimization.scaled_lr(mesh.data_size))

    def _prepare(self) -> nn.Module:
        raise NotImplementedError

    def _make_optimizer(self, lr: float) -> torch.optim.Optimizer:
        config, device = self.optimization, self.group.device
        parameters = self.parameters()
        options = optimizer_options(config, device, lr, has_parts=any(map(is_spread, parameters)))
        return optimizer_class(config)(parameter_groups(parameters, config.weight_decay), **options)

    def parameters(self) -> list[nn.Parameter]:
        """Those of which this rank has gradients."""
        return list(self.model.parameters())

    def state(self) -> TrainingState:
        """What is saved of it."""
        return plain_state(self.bare, self.optimizer, self.group, self.precision.scaler)

    def sync(self, last: bool) -> AbstractContextManager[Any]:
        """Inside, gradients cross the network if this is the last micro-batch of the step."""
        del last
        return nullcontext()

    def micro_batch(self, src: Tensor, tgt: Tensor, factor: float, last: bool, at: At) -> Tensor:
        """Forward and backward; the mean loss, a scalar on the device. `at` is told where it is."""
        with self.sync(last):
            at("forward")
            with record_function("forward"):
                loss = self.loss_of(self.model, src, tgt)
            at("backward")
            # An even batch has factor 1 and takes the very path of a plain loop.
            with record_function("backward"):
                self.precision.backward(loss if factor == 1.0 else loss * factor)
        return loss.detach()

    def as_in_a_step(self) -> AbstractContextManager[Any]:
        """Inside, the bare model is compiled as for the wrapped one; nothing is sent."""
        return nullcontext()

    def loss_of(self, model: nn.Module, src: Tensor, tgt: Tensor) -> Tensor:
        """The mean loss of `model`, which is the wrapped one or the bare."""
        with self.precision.autocast():
            return self.task.loss(self.task.forward(model, src, tgt), tgt)

    def keep_gradients(self) -> None:
        """Moves them out of a CUDA graph's memory, which its next replay overwrites.

        torch refuses to add to them there (https://github.com/pytorch/pytorch/issues/169545).
        """
        held = [parameter for parameter in self.parameters() if parameter.grad is not None]
        grads = [parameter.grad for parameter in held if parameter.grad is not None]
        copies = [torch.empty_like(grad) for grad in grads]
        if copies:
            torch._foreach_copy_(copies, grads)
        for parameter, copy in zip(held, copies, strict=True):
            parameter.grad = copy

    def finish_gradients(self) -> None:
        """After the last micro-batch: what `sync` has not done."""

    def gradient_norm(self) -> Tensor:
        """Of all gradients of the whole model, a scalar."""
        return global_norm(self.parameters())

    def limit_gradients(self, norm: Tensor, max_norm: float) -> None:
        """Scales the gradients, of this norm, so that it is at most that."""
        limit_norm(self.parameters(), norm, max_norm)

    def output(self, src: Tensor, tgt: Tensor) -> Any:
        """The model's output, without gradients; None on a rank that does not get it."""
        with self.precision.autocast():
            return self.task.forward(self.model, src, tgt)

    def settle(self, src: Tensor, tgt: Tensor) -> None:
        """Before a state is restored: brings the strategy itself into its later state."""

    def state_bytes(self) -> int:
        """Bytes that parameters, gradients and the optimizer's state take on this rank."""
        tensors: list[Tensor] = []
        for parameter in self.parameters():
            tensors += [parameter, *([] if parameter.grad is None else [parameter.grad])]
        for values in self._local_optimizer().state.values():
            tensors += [value for value in values.values() if isinstance(value, Tensor)]
        return sum((t.to_local() if hasattr(t, "to_local") else t).nbytes for t in tensors)

    def _local_optimizer(self) -> torch.optim.Optimizer:
        return self.optimizer

    def _refuse(self, why: str, instead: str) -> RequestError:
        return RequestError(f"--strategy {self.config.strategy}: {why}; {instead}")


class Single(Strategy):
    """One process with the whole model, on one device or several."""

    def _prepare(self) -> nn.Module:
        if self.config.devices_per_rank > 1:
            return Replica(self.task, self.group, self.config.devices_per_rank)
        return self.bare.to(self.group.device)
