"""A model shared by the ranks of the world that is open, by the strategies of the training."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ddp_hpc.errors import RequestError, nearest
from ddp_hpc.library.world import ConnectedWorld, current_world
from ddp_hpc.training.layers import checkpoint_activations
from ddp_hpc.training.precision import Precision
from ddp_hpc.training.state import TrainingState, plain_state
from ddp_hpc.training.strategies import make_strategy
from ddp_hpc.training.strategies.mesh import parse_mesh
from ddp_hpc.training.task import Task, shapes_text

if TYPE_CHECKING:
    from ddp_hpc.training.config import TrainConfig

STRATEGIES = ("ddp", "fsdp", "single")
_OPTIONS = (
    "mesh", "bucket_mib", "static_graph", "find_unused_parameters", "compress_gradients", "sync_batchnorm",
    "amp", "cpu_offload", "activation_checkpointing",
)  # fmt: skip
# Their loops do more than forward, backward and an optimizer's step.
_OF_THE_TRAINING = ("zero", "tp", "pp", "dataparallel")


def wrap(model: nn.Module, strategy: str = "ddp", **options: Any) -> nn.Module:
    """The model on this rank's device, shared with the others. Make the optimizer from what it gives.

    Collective: every rank must call this.

    Args:
        model: the same on every rank.
        strategy: `ddp`: a replica a rank, gradients averaged; `fsdp`: parameters, gradients and the
            optimizer's state spread over ranks; `single`: for a world of one.
        options: those of `python -m ddp_hpc.train` for the strategy, in Python's spelling: for ddp
            bucket_mib, static_graph, find_unused_parameters, compress_gradients="bf16" and
            sync_batchnorm; for fsdp amp="bf16", cpu_offload and mesh="dp=2,fsdp=4" (with strategy left
            out); activation_checkpointing for both.

    Raises:
        RequestError: an unknown strategy or option, or one that these ranks cannot share the model by.
    """
    world = current_world("ddp_hpc.wrap()")
    config = _config(world, strategy, options)
    own = shapes_text(model)
    first = world.broadcast(own)
    pairs = zip(own.split("), "), first.split("), "), strict=False)
    seen, needed = next((pair for pair in pairs if pair[0] != pair[1]), (own[-80:], first[-80:]))
    differs = f"the model is another one on rank {world.rank}: {seen} and not {needed}, as on rank 0"
    world.group.agree("" if own == first else differs, RequestError.exit_code)
    if config.activation_checkpointing:
        checkpoint_activations(model)
    shared = make_strategy(Task(model=model), world.group, config, Precision(config.amp, world.device))
    world.shared.append(shared)
    return shared.model


def state_of(world: ConnectedWorld, model: nn.Module, optimizer: torch.optim.Optimizer) -> TrainingState:
    """What is saved of a model that `wrap` has given, and of its optimizer."""
    while isinstance(compiled := getattr(model, "_orig_mod", None), nn.Module):  # of torch.compile
        model = compiled
    shared = next((one for one in world.shared if model in (one.model, one.bare)), None)
    if shared is None:
        return plain_state(model, optimizer, world.group)
    return replace(shared.state(), optimizer=optimizer)


def _config(world: ConnectedWorld, strategy: str, options: dict[str, Any]) -> TrainConfig:
    if strategy in _OF_THE_TRAINING:
        raise RequestError(
            f"strategy={strategy!r}: needs the training's own loop; bring the model to it: "
            f"python -m ddp_hpc.train --model package.module:factory --strategy {strategy}"
        )
    if strategy not in STRATEGIES:
        raise RequestError(
            f"strategy={strategy!r}: unknown{nearest(strategy, STRATEGIES)}; one of {', '.join(STRATEGIES)}"
        )
    for name in options:
        if name not in _OPTIONS:
            raise RequestError(
                f"wrap(..., {name}=): unknown{nearest(name, _OPTIONS)}; one of {', '.join(_OPTIONS)}"
            )
    if strategy == "single" and world.world_size > 1:
        raise RequestError(
            f"strategy='single': {world.world_size} ranks were started, and each would train a model of its "
            "own; use strategy='ddp', or start one process"
        )
    mesh = options.get("mesh")
    if mesh is not None and parse_mesh(mesh, world.world_size).keys() & {"tp", "pp"}:
        raise RequestError(
            f"mesh={mesh!r}: tp and pp need the training's own loop; bring the model to it: "
            f"python -m ddp_hpc.train --model package.module:factory --mesh {mesh}"
        )
    if options.get("amp", "off") != "off" and strategy != "fsdp" and "fsdp" not in (mesh or ""):
        raise RequestError("amp= goes with strategy='fsdp'; with ddp put torch.autocast around the forward")
    return replace(world.config, strategy="ddp" if strategy == "single" else strategy, **options)
