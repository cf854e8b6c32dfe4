"""Runs whole steps as one CUDA graph: the host starts a step with one call instead of thousands.

After https://docs.pytorch.org/docs/stable/notes/cuda.html (CUDA Graphs). All work of the main thread is on
one stream that is not the default stream, because DDP and autograd keep the stream of their creation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from ddp_hpc.base.errors import DdpHpcError, RequestError

if TYPE_CHECKING:
    from ddp_hpc.training.optimization.config import OptimizationConfig
    from ddp_hpc.training.process_group.group import Group

Batch: TypeAlias = tuple[Tensor, Tensor]
Compute: TypeAlias = Callable[[Iterable[Batch]], Tensor]


def check_device(config: OptimizationConfig, group: Group) -> None:
    """Raises RequestError if --cuda-graph cannot be used on this device or with this backend."""
    if not config.cuda_graph:
        return
    if group.device.type != "cuda":
        raise RequestError(f"--cuda-graph needs a CUDA device, but this rank uses {group.device}; omit it")
    if group.backend not in ("none", "nccl"):
        raise RequestError(
            f"--cuda-graph cannot be used with --backend {group.backend}, whose collectives wait for the "
            "host; use --backend nccl, or omit --cuda-graph"
        )


def use_one_stream(device: torch.device) -> None:
    """Makes all later work of this thread on the GPU use one stream that can be captured."""
    torch.cuda.set_stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]


class StepGraph:
    """Runs the first steps normally, then captures one, and replays it for all steps of the same size.

    A step with fewer samples, such as the last one of an epoch, runs normally. `compute` runs the step on
    its micro-batches and returns the sum of the losses. It must not read a value of the device, and
    everything that changes between steps must be in tensors, such as the learning rate.
    """

    def __init__(self, num_eager: int) -> None:
        self._num_eager = num_eager
        self._left = 0
        self._num_samples = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: list[Batch] = []
        self._loss_sum: Tensor | None = None

    def run(self, num_samples: int, batches: Iterable[Batch], compute: Compute) -> Tensor:
        """Runs a step of `num_samples` samples, over all ranks; returns the sum of this rank's losses.

        Raises:
            DdpHpcError: the step cannot be captured.
        """
        if num_samples > self._num_samples:  # the full steps are the largest
            self.drop()
            self._num_samples, self._left = num_samples, self._num_eager
        if num_samples < self._num_samples or self._left:
            self._left = max(0, self._left - 1)
            return compute(batches)
        if self._graph is None:
            # The loader reuses the memory of its batches, but a graph reads the same memory in each step.
            self._inputs = [(src.clone(), tgt.clone()) for src, tgt in batches]
            self._capture(compute)
        else:
            for own, given in zip(self._inputs, batches, strict=True):
                for target, source in zip(own, given, strict=True):
                    target.copy_(source, non_blocking=True)
        assert self._graph is not None
        assert self._loss_sum is not None
        self._graph.replay()
        return self._loss_sum.clone()  # the next replay overwrites the sum

    def drop(self) -> None:
        """Frees the graph. Call it before the process group is destroyed, whose collectives it contains."""
        if self._graph is not None:
            self._graph.reset()
        self._graph = self._loss_sum = None
        self._inputs = []

    def _capture(self, compute: Compute) -> None:
        """Records the work of a step without running it."""
        graph = torch.cuda.CUDAGraph()
        try:
            # The thread that reads data allocates memory and copies meanwhile, which the default mode of a
            # capture does not allow.
            with torch.cuda.graph(
                graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"
            ):
                self._loss_sum = compute(self._inputs)
        except RuntimeError as error:
            # torch raises a second error at the end of a capture that has failed.
            first = error.__context__ if isinstance(error.__context__, RuntimeError) else error
            reason = next(iter(str(first).splitlines()), type(first).__name__)
            raise DdpHpcError(
                f"--cuda-graph: the step cannot be captured: {reason}. The model or the loss must not read "
                "values of the GPU on the host; change it, or omit --cuda-graph"
            ) from error
        self._graph = graph
