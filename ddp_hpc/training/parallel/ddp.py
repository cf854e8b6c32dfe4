"""The strategies `ddp` (replicas that average their gradients) and `zero` (DDP with a sharded optimizer)."""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_hpc.base.errors import DdpHpcError
from ddp_hpc.base.option_names import named
from ddp_hpc.training.optimization.optimizers import optimizer_class, optimizer_options, parameter_groups
from ddp_hpc.training.parallel.base import WholeModel
from ddp_hpc.training.parallel.replica import Replica
from ddp_hpc.training.snapshots.training_state import TrainingState

# This option of torch 2.13 copies all gradients of a bucket with one kernel, instead of one per gradient.
# `gradient_as_bucket_view` does not avoid the copies if gradients are set to None.
_BATCHED_COPY: dict[str, Any] = (
    {"batched_grad_copy": True}
    if "batched_grad_copy" in inspect.signature(DistributedDataParallel).parameters
    else {}
)


class Ddp(WholeModel):
    """The strategy with one replica of the model per rank, on one device or several."""

    model: DistributedDataParallel
    # In its first ten steps, DDP measures times with events, which cannot be part of a graph.
    eager_steps = 11
    _is_known = False

    def _prepare(self) -> nn.Module:
        config, device = self.config, self.group.device
        replica: nn.Module = self.bare
        ids = None if device.type == "cpu" else [device]
        if config.devices_per_rank > 1:
            replica, ids = Replica(self.task, self.group, config.devices_per_rank), None
        else:
            replica.to(device)
        if config.sync_batchnorm:
            if device.type == "cpu":
                raise self._unsupported(
                    f"{named('sync_batchnorm')} needs GPUs (torch.nn.SyncBatchNorm does not support CPUs)",
                    "omit it",
                )
            self.forward_is_collective = True
            replica = self.bare = nn.SyncBatchNorm.convert_sync_batchnorm(replica)  # type: ignore[no-untyped-call]
        model = DistributedDataParallel(
            self._with_loss(replica),
            device_ids=ids,
            gradient_as_bucket_view=True,
            bucket_cap_mb=config.bucket_mib,
            static_graph=config.static_graph,
            find_unused_parameters=config.find_unused_parameters,
            **_BATCHED_COPY,
        )
        if config.compress_gradients:
            if config.compress_gradients == "bf16" and device.type == "cpu":
                raise self._unsupported(
                    f"{named('compress_gradients')} bf16 needs NCCL or XCCL; torch's hook does not support "
                    "gloo",
                    "use fp16",
                )
            from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

            hook = {"bf16": default_hooks.bf16_compress_hook, "fp16": default_hooks.fp16_compress_hook}
            model.register_comm_hook(None, hook[config.compress_gradients])
        return model

    def sync(self, last: bool) -> AbstractContextManager[Any]:
        """Returns a context that communicates gradients only for the last micro-batch of a step."""
        return nullcontext() if last else self.model.no_sync()

    def as_in_a_step(self) -> AbstractContextManager[Any]:
        """Returns a context in which torch splits compiled code at DDP's buckets, as in DDP's forward pass.

        Code that is compiled outside of this context is not split, but DDP would use this code as well. All
        gradients would then become ready at once, at the end of the backward pass.
        """
        return self.model._inside_ddp_forward()

    def finish_gradients(self) -> None:
        """Checks in the first step that all parameters have gradients, because DDP would wait for them.

        Raises:
            DdpHpcError: a parameter has no gradient, and no option allows it.
        """
        if self._is_known:
            return
        self._is_known = True
        if self.config.find_unused_parameters or self.config.static_graph:
            return
        unused = [n for n, p in self.bare.named_parameters() if p.requires_grad and p.grad is None]
        if unused:
            raise DdpHpcError(
                f"{len(unused)} of the model's parameters received no gradient: {', '.join(unused[:5])}"
                f"{', ...' if len(unused) > 5 else ''}. The forward pass does not use them; remove them "
                f"from the model, set requires_grad=False, or use {named('find_unused_parameters')}"
            )

    def prepare_restore(self, src: Tensor, tgt: Tensor) -> None:
        """Runs one backward pass and discards the gradients.

        After its first backward pass, DDP rebuilds its buckets in the order in which gradients became
        ready. With three or more ranks, the last bit of a summed gradient depends on its place in a
        bucket, so without this pass the first step after a restart would not be reproducible.
        """
        self.loss(src, tgt).backward()  # type: ignore[no-untyped-call]
        self.finish_gradients()  # otherwise, DDP would fail in the next forward pass
        self.model.zero_grad(set_to_none=True)


class Zero(Ddp):
    """DDP in which each rank holds a shard of the optimizer state (arXiv 1910.02054, stage 1)."""

    def _make_optimizer(self, lr: float) -> torch.optim.Optimizer:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        config, device = self.optimization, self.group.device
        first, *others = parameter_groups(self.parameters(), config.weight_decay)
        options = optimizer_options(config, device, lr)
        if "weight_decay" in first:
            options["weight_decay"] = first["weight_decay"]
        optimizer = ZeroRedundancyOptimizer(first["params"], optimizer_class(config), **options)
        for group in others:
            optimizer.add_param_group(group)
        return optimizer

    def _local_optimizer(self) -> torch.optim.Optimizer:
        return self.optimizer.optim  # type: ignore[attr-defined, no-any-return]  # ZeroRedundancyOptimizer's

    def state(self) -> TrainingState:
        """Returns the state that snapshots save; each rank holds the optimizer state of some parameters."""
        return replace(super().state(), optimizers=(self._local_optimizer(),), optimizer_is_sharded=True)
