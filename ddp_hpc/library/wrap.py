"""`ddp_hpc.wrap`: distributes a model over the ranks with the strategies of the training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import nn

from ddp_hpc.base.errors import RequestError, nearest
from ddp_hpc.base.mesh_sizes import parse_mesh
from ddp_hpc.library.connected_world import ConnectedWorld, current_world
from ddp_hpc.training.parallel.config import StrategyName
from ddp_hpc.training.parallel.make_strategy import make_strategy
from ddp_hpc.training.parallel.model_layers import checkpoint_activations
from ddp_hpc.training.tasks.task import Task, shapes_text

if TYPE_CHECKING:
    from ddp_hpc.training.config import TrainConfig

STRATEGIES = ("ddp", "fsdp", "single")
_OPTIONS = (
    "mesh", "bucket_mib", "static_graph", "find_unused_parameters", "compress_gradients", "sync_batchnorm",
    "amp", "cpu_offload", "activation_checkpointing",
)  # fmt: skip
# A step of the other strategies is more than a forward pass, a backward pass and an update, so they do
# not work in a user's loop.
_OF_THE_TRAINING = {*get_args(StrategyName)} - {*STRATEGIES}


def wrap(model: nn.Module, strategy: str = "ddp", **options: Any) -> nn.Module:
    """Moves the model to this rank's device and wraps it. Create the optimizer from the returned model.

    Collective: every rank must call this.

    Args:
        model: the same model on every rank.
        strategy: `ddp`: one replica per rank, gradients are averaged; `fsdp`: parameters, gradients and
            the optimizer's state are sharded over ranks; `single`: one process.
        options: the options of `python -m ddp_hpc.train` for the strategy, with underscores: for ddp
            bucket_mib, static_graph, find_unused_parameters, compress_gradients="bf16" and
            sync_batchnorm; for fsdp: amp="bf16", cpu_offload, and mesh="dp=2,fsdp=4" (then omit strategy);
            activation_checkpointing for both.

    Raises:
        RequestError: an unknown strategy or option, or one that does not fit these ranks or this model.
    """
    world = current_world("ddp_hpc.wrap()")
    config = _config(world, strategy, options)
    if config.parallel.cpu_offload and world.device.type != "cpu" and world.group.backend != "none":
        _check_offload(torch.distributed.get_backend_config())
    own = shapes_text(model)
    first = world.broadcast(own)
    pairs = zip(own.split("), "), first.split("), "), strict=False)
    seen, needed = next((pair for pair in pairs if pair[0] != pair[1]), (own[-80:], first[-80:]))
    differs = (
        f"the model differs between ranks: {seen} on rank {world.rank}, {needed} on rank 0; create the same "
        "model on every rank"
    )
    world.group.agree("" if own == first else differs)
    if config.parallel.activation_checkpointing:
        checkpoint_activations(model)
    task = Task(model=model)
    shared = make_strategy(task, world.group, config.parallel, config.optimization, computes_loss=False)
    world.shared.append(shared)
    return shared.model


def _config(world: ConnectedWorld, strategy: str, options: dict[str, Any]) -> TrainConfig:
    if strategy in _OF_THE_TRAINING:
        raise RequestError(
            f"strategy={strategy!r} is only available in ddp_hpc.train; use "
            f"python -m ddp_hpc.train --model package.module:factory --strategy {strategy}"
        )
    if strategy not in STRATEGIES:
        raise RequestError(
            f"strategy={strategy!r} is unknown{nearest(strategy, STRATEGIES)}; use {', '.join(STRATEGIES)}"
        )
    for name in options:
        if name not in _OPTIONS:
            raise RequestError(
                f"wrap(..., {name}=) is unknown{nearest(name, _OPTIONS)}; use {', '.join(_OPTIONS)}"
            )
    if strategy == "single" and world.world_size > 1:
        raise RequestError(
            f"strategy='single': {world.world_size} ranks were started, and each would train its own model. "
            "Use strategy='ddp', or start one process"
        )
    mesh = options.get("mesh")
    if mesh is not None and parse_mesh(mesh, world.world_size).keys() & {"tp", "pp"}:
        raise RequestError(
            f"mesh={mesh!r}: tp and pp are only available in ddp_hpc.train; use "
            f"python -m ddp_hpc.train --model package.module:factory --mesh {mesh}"
        )
    if options.get("amp", "off") != "off" and strategy != "fsdp" and "fsdp" not in (mesh or ""):
        raise RequestError("amp= requires strategy='fsdp'; with ddp use torch.autocast for the forward pass")
    return world.config.changed(strategy="ddp" if strategy == "single" else strategy, **options)


def _check_offload(backends: str) -> None:
    """Raises RequestError if the ranks cannot exchange tensors in host memory, for example with only NCCL.

    Computing the norm of gradients, as torch.nn.utils.clip_grad_norm_ does, would fail with `No backend type
    associated with device type cpu` (https://github.com/pytorch/pytorch/issues/148532).
    """
    if "cpu:" not in backends:
        raise RequestError(
            "wrap(..., cpu_offload=True) keeps gradients in host memory, which NCCL and XCCL cannot read; "
            "use ddp_hpc.distributed(cpu_offload=True), which also connects the ranks with gloo"
        )
