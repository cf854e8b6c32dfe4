"""Pipeline parallelism: each rank holds some of the layers, and a batch passes through them in chunks."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from ddp_hpc.training.optimization.gradients import global_norm, mean_over
from ddp_hpc.training.parallel.base import At, Strategy
from ddp_hpc.training.parallel.model_layers import split_stages
from ddp_hpc.training.parallel.tensor_parallel import move_whole_layers, split_layers
from ddp_hpc.training.snapshots.host_buffer import specs_of
from ddp_hpc.training.snapshots.training_state import TrainingState, live_tensors
from ddp_hpc.training.telemetry.trace_annotations import annotated

_SCHEDULES: dict[str, type[ScheduleGPipe | Schedule1F1B]] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


class Pipeline(Strategy):
    """The strategy with one stage per rank. Replicas average their gradients after the backward pass."""

    forward_is_collective = True
    calls_task_model = False

    def _prepare(self) -> nn.Module:
        mesh, device = self.mesh, self.group.device
        if mesh.has("fsdp"):
            raise self._unsupported(
                f"--mesh {mesh}: the stages of a pipeline cannot be sharded", "use dp instead of fsdp"
            )
        if self.optimization.amp == "fp16":
            raise self._unsupported("a pipeline does not support the loss scaling of fp16", "use --amp bf16")
        if self.optimization.compile is not None:
            raise self._unsupported("the stages of a pipeline cannot be compiled", "omit --compile")
        if mesh.has("tp"):
            split_layers(self.task, mesh, compiles=False)
        stages = split_stages(self.task, mesh.sizes["pp"])
        self._takes = len(inspect.signature(stages[0].forward).parameters)
        stage = stages[mesh.at["pp"]]
        move_whole_layers(stage, device)
        own = {id(tensor) for tensor in chain(stage.parameters(), stage.buffers())}
        _release_others(self.bare, own)
        live = live_tensors(self.bare)
        self._whole = specs_of(live)
        self._live = {name: tensor for name, tensor in live.items() if id(tensor) in own}
        stage.forward = _contiguous(self.precision.cast(stage.forward))
        self._is_first, self._is_last = mesh.at["pp"] == 0, mesh.at["pp"] == mesh.sizes["pp"] - 1
        # One schedule per number of samples, because a schedule has fixed shapes and the last step of an
        # epoch can have fewer samples.
        self._schedules: dict[int, ScheduleGPipe | Schedule1F1B] = {}
        self._factor, self._losses = 1.0, list[Tensor]()
        self._num_chunks = 1
        return stage

    def micro_batch(self, src: Tensor, tgt: Tensor, factor: float, last: bool, at: At) -> Tensor:
        """Runs all chunks forward and backward; returns the mean loss on the last stage, 0 on the others."""
        del last  # `finish_gradients` averages the gradients of the replicas
        at("forward")
        schedule = self._schedule(len(src))
        self._factor = factor / self._num_chunks
        self._losses.clear()
        inputs = (src, tgt)[: self._takes] if self._is_first else ()
        with annotated("forward and backward"):
            schedule.step(*inputs, target=tgt if self._is_last else None)
        if not self._is_last:
            return torch.zeros((), device=self.group.device)
        # In the first step with a new batch size, torch also calls the loss on zeros to infer shapes.
        return torch.stack(self._losses[-self._num_chunks :]).mean()

    def finish_gradients(self) -> None:
        """Averages the gradients over the replicas."""
        if self.mesh.has("dp"):
            mean_over(self.parameters(), self.mesh.sub("dp").get_group())

    def gradient_norm(self) -> Tensor:
        """Returns the norm of the gradients of all stages."""
        pipeline = self.mesh.sub("pp").get_group()
        return global_norm(self.parameters(), across=pipeline, device=self.group.device)

    def output(self, src: Tensor, tgt: Tensor) -> Any:
        """Returns the model's output on the last stage; None on the others."""
        schedule = self._schedule(len(src))
        self._factor = 1.0 / self._num_chunks
        inputs = (src, tgt)[: self._takes] if self._is_first else ()
        return schedule.eval(*inputs, target=tgt if self._is_last else None)

    def state(self) -> TrainingState:
        """Returns the state that snapshots save, of which this rank holds its stage."""
        return replace(super().state(), model=self._live, whole=self._whole, model_is_sharded=True)

    def _schedule(self, num_samples: int) -> ScheduleGPipe | Schedule1F1B:
        if num_samples not in self._schedules:
            group: dist.ProcessGroup = self.mesh.sub("pp").get_group()
            stage = _Stage(
                self.model, self.mesh.at["pp"], self.mesh.sizes["pp"], self.group.device, group=group
            )
            wanted = min(self.config.pipeline_chunks or 2 * self.mesh.sizes["pp"], num_samples)
            chunks = next(n for n in range(wanted, 0, -1) if num_samples % n == 0)
            kind = _SCHEDULES[self.config.pipeline_schedule if chunks >= self.mesh.sizes["pp"] else "gpipe"]
            # `_loss` scales the loss instead: scale_grads would scale accumulated gradients several times.
            self._schedules[num_samples] = kind(stage, chunks, loss_fn=self._loss, scale_grads=False)
        schedule = self._schedules[num_samples]
        self._num_chunks = schedule._n_microbatches
        return schedule

    def _loss(self, output: Any, tgt: Tensor) -> Tensor:
        loss = self.task.loss(output, tgt)
        self._losses.append(loss.detach())
        return loss * self._factor


def _release_others(model: nn.Module, own: set[int]) -> None:
    """Releases the memory of all parameters and buffers of a model, except those with the ids `own`."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in own:
                on_meta = torch.empty_like(parameter, device="meta")
                module._parameters[name] = nn.Parameter(on_meta, parameter.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None and id(buffer) not in own:
                module._buffers[name] = torch.empty_like(buffer, device="meta")


class _Stage(PipelineStage):
    """A stage whose running means and random numbers stay unchanged while torch infers shapes.

    Before the first step with a new batch shape, torch calls the stage once on zeros (2.8) or on
    uninitialized memory (2.13): a batch norm would keep those values, even NaN.
    """

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        buffers = list(self.submod.buffers())
        kept = [buffer.clone() for buffer in buffers]
        devices = [self.device] if self.device.type != "cpu" else []
        with torch.random.fork_rng(devices, device_type=self.device.type if devices else "cuda"):
            result = super()._prepare_forward_infra(*args, **kwargs)
        for buffer, value in zip(buffers, kept, strict=True):
            buffer.data.copy_(value)  # with .data, so that autograd does not record the copy
        return result


class _ContiguousGradient(torch.autograd.Function):
    """The identity function; its backward pass makes the gradient contiguous."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        del ctx
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        del ctx
        return grad.contiguous()


def _contiguous(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `forward`: outputs and the gradients of inputs become contiguous, so that they can be sent."""

    def call(*inputs: Tensor) -> Any:
        output = forward(*(_ContiguousGradient.apply(v) if v.requires_grad else v for v in inputs))  # type: ignore[no-untyped-call]
        if isinstance(output, tuple):
            return tuple(value.contiguous() for value in output)
        return output.contiguous()

    return call
