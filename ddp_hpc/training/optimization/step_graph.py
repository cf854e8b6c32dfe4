"""Runs whole steps as one CUDA graph: the host starts a step with one call instead of thousands.

After https://docs.pytorch.org/docs/stable/notes/cuda.html (CUDA Graphs). All work of the main thread is on
one stream that is not the default stream, because DDP and autograd keep the stream of their creation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from ddp_hpc.base.errors import DdpHpcError, RequestError
from ddp_hpc.training.process_group.errors_of_torch import known_cause

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


@dataclass(frozen=True)
class CapturedStep:
    """A step as a graph, and the memory that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    inputs: list[Batch]
    loss_sum: Tensor


class StepGraph:
    """Runs the first steps normally, then captures one step of each size, and replays it for later steps.

    The last step of an epoch can be smaller than the others. The first step of each size runs normally too,
    so that the code for this size is compiled and loaded before the capture. `compute` runs a step on its
    micro-batches and returns the sum of the losses. It must not read a value of the device, and everything
    that changes between steps of the same size must be in tensors, such as the learning rate.
    """

    def __init__(self, num_eager: int) -> None:
        self._left = num_eager
        self._known: set[int] = set()
        self._captured: dict[int, CapturedStep] = {}

    def run(self, num_samples: int, batches: Iterable[Batch], compute: Compute) -> Tensor:
        """Runs a step of `num_samples` samples, over all ranks; returns the sum of this rank's losses.

        Raises:
            DdpHpcError: the step cannot be captured.
        """
        if self._left or num_samples not in self._known:
            self._left = max(0, self._left - 1)
            self._known.add(num_samples)
            # Its activations would need as much memory again as those of the graphs.
            self.drop()
            return compute(batches)
        if (step := self._captured.get(num_samples)) is None:
            # The loader reuses the memory of its batches, but a graph reads the same memory in each step.
            step = self._capture([(src.clone(), tgt.clone()) for src, tgt in batches], compute)
            self._captured[num_samples] = step
        else:
            for own, given in zip(step.inputs, batches, strict=True):
                for target, source in zip(own, given, strict=True):
                    target.copy_(source, non_blocking=True)
        step.graph.replay()
        return step.loss_sum.clone()  # the next replay overwrites the sum

    def drop(self) -> None:
        """Frees the graphs. Call it before the process group is destroyed, whose collectives they contain."""
        if not self._captured:
            return
        for step in self._captured.values():
            step.graph.reset()
        self._captured.clear()
        torch.cuda.empty_cache()  # torch keeps the memory of graphs apart from that of normal steps

    def _capture(self, inputs: list[Batch], compute: Compute) -> CapturedStep:
        """Records the work of a step without running it."""
        graph = torch.cuda.CUDAGraph()
        # The graphs share their memory: they never run at the same time, each replay computes all values that
        # it reads except the inputs and the state of the training, and the sum is copied before the next one.
        pool = next((step.graph.pool() for step in self._captured.values()), None)
        try:
            # The thread that reads data allocates memory and copies meanwhile, which the default mode of a
            # capture does not allow.
            with torch.cuda.graph(
                graph, pool=pool, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"
            ):
                return CapturedStep(graph, inputs, compute(inputs))
        except RuntimeError as error:
            # torch raises a second error at the end of a capture that has failed.
            first = error.__context__ if isinstance(error.__context__, RuntimeError) else error
            if known_cause(first):
                raise first from None
            reason = next(iter(str(first).splitlines()), type(first).__name__)
            raise DdpHpcError(
                f"--cuda-graph: the step cannot be captured: {reason}. The model and the loss must not copy "
                "values from the GPU to the host, as .item() does; change them, or omit --cuda-graph"
            ) from error
