"""The FSDP2 strategy: shards parameters, gradients and optimizer state, and gathers a layer while it is used.

It can be combined with replicas of the sharded model (dp and fsdp: "hybrid sharding") and with
tensor-parallel layers.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from ddp_hpc.base.option_names import named
from ddp_hpc.training.optimization.precision import AMP_DTYPES, Precision
from ddp_hpc.training.optimization.torch_compile import compile_modules
from ddp_hpc.training.parallel.base import Strategy
from ddp_hpc.training.parallel.model_layers import blocks_of
from ddp_hpc.training.parallel.tensor_parallel import split_layers


class Fsdp(Strategy):
    """The strategy in which each rank holds one shard of the training state."""

    forward_is_collective = True

    def _prepare(self) -> nn.Module:
        config, optimization = self.config, self.optimization
        device, mesh = self.group.device, self.mesh
        if config.cpu_offload and device.type == "cpu":
            raise self._unsupported(
                f"{named('cpu_offload')} moves unused parameters from the GPU to the host, but there is no "
                "GPU",
                "omit it",
            )
        if optimization.amp == "fp16":
            raise self._unsupported(
                "the loss scaling of fp16 does not support sharded gradients", f"use {named('amp')} bf16"
            )
        if optimization.uses_cuda_graphs:
            raise self._unsupported(
                f"--compile {optimization.compile} replays CUDA graphs, which need parameters at "
                "fixed addresses, but fsdp gathers each layer into new memory",
                "use --compile without a mode, or --compile max-autotune-no-cudagraphs",
            )
        # Mixed precision is part of the FSDP policy below.
        self.precision = Precision("off", device)
        model = self.bare
        # The fast path of attention in evaluation would read parameters of layers that are not gathered.
        torch.backends.mha.set_fastpath_enabled(False)
        if mesh.has("tp"):
            split_layers(self.task, mesh, compiles=optimization.compile is not None)
        # torch moves the model from the host to the device one block at a time, and keeps only the shards.
        options: dict[str, Any] = {
            "mesh": mesh.sub("dp", "fsdp") if mesh.has("dp") else mesh.sub("fsdp"),
            "offload_policy": CPUOffloadPolicy() if config.cpu_offload else OffloadPolicy(),
        }
        if optimization.compile is not None:
            compile_modules(blocks_of(model), optimization.compile)
        blocks = [
            fully_shard(block, mp_policy=_precision_policy(optimization.amp), **options)
            for block in blocks_of(model)
        ]
        _prefetch(blocks)
        fully_shard(model, mp_policy=_precision_policy(optimization.amp, torch.float32), **options)
        return model

    def sync(self, last: bool) -> AbstractContextManager[Any]:
        """Returns a context that reduces gradients only for the last micro-batch of a step.

        Until then, each rank keeps the whole gradients, and the whole parameters, which do not change before
        the update.
        """
        assert isinstance(self.model, FSDPModule)
        self.model.set_requires_gradient_sync(last)
        self.model.set_reshard_after_backward(last)
        return nullcontext()


def _prefetch(blocks: list[FSDPModule]) -> None:
    """Starts to gather each block before the previous one computes, in the forward pass.

    Otherwise, the host first launches all kernels of the previous block. In the backward pass, torch already
    does this. If a model calls its blocks in another order, the results do not change.
    """
    for block, following in pairwise(blocks):
        block.set_modules_to_forward_prefetch([following])


def _precision_policy(amp: str, output_dtype: torch.dtype | None = None) -> MixedPrecisionPolicy:
    """Returns the policy that gathers layers in the half-precision type and sums gradients in float32."""
    if amp == "off":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(
        param_dtype=AMP_DTYPES[amp], reduce_dtype=torch.float32, output_dtype=output_dtype
    )
