"""Finds the first layer that has NaN or infinite values, and the rank on which this happens."""

from __future__ import annotations

from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ddp_hpc.base.errors import DdpHpcError, stop_together
from ddp_hpc.base.units import counted
from ddp_hpc.training.parallel.make_strategy import Strategy
from ddp_hpc.training.snapshots.dtensor_shards import local_shard


def raise_bad_gradients(strategy: Strategy, step: int, src: Tensor, tgt: Tensor) -> NoReturn:
    """Finds the cause of a non-finite gradient, and ends the training with that error.

    Each rank recomputes its last micro-batch layer by layer, before any update.
    Collective: every rank must call this.

    Raises:
        DdpHpcError: in all cases; on rank 0, the message names the first rank on which a cause was found.
    """
    world = strategy.group.world
    where, cause = strategy.group.comm.combine(_cause(strategy, src, tgt), _first_cause)
    error = DdpHpcError(
        f"step {step}: non-finite gradients on rank {where}: {cause}. The parameters were not updated. "
        "Check the data, lower --lr, or use --clip-norm"
    )
    if world.world_size == 1:
        raise error
    stop_together(world.rank, error)


def _first_cause(causes: list[str]) -> tuple[str, str]:
    rank, cause = next(
        ((rank, text) for rank, text in enumerate(causes) if text),
        (0, "the inputs and outputs of all layers are finite"),
    )
    others = sum(map(bool, causes)) - 1
    return f"{rank} and {counted(others, 'other rank')}" if others > 0 else f"{rank}", cause


def _cause(strategy: Strategy, src: Tensor, tgt: Tensor) -> str:
    """Describes the first non-finite value on this rank; empty if all values are finite."""
    for name, values in (("src", src), ("tgt", tgt)):
        if values.is_floating_point() and (text := _bad(values)):
            return f"{text} in the data ({name})"
    if strategy.forward_is_collective:
        return _bad_gradient(strategy)
    causes: list[str] = []
    names = {module: name for name, module in strategy.bare.named_modules()}
    hooks = [
        module.register_forward_hook(partial(_check_layer, causes, name))
        for module, name in names.items()
        if not any(True for _ in module.children())
    ]
    for parameter in strategy.parameters():
        parameter.grad = None
    try:
        # Compiled code does not call hooks that were registered later.
        with torch.compiler.set_stance("force_eager"):
            # The bare model is called and not DDP, whose forward broadcasts buffers to all ranks: a rank with
            # non-finite data has already returned above and would be missing.
            output = strategy.output(src, tgt)
            with strategy.precision.autocast():
                loss = strategy.task.loss(output, tgt)
            strategy.precision.backward(loss)
    finally:
        for hook in hooks:
            hook.remove()
    if causes:
        return causes[0]
    if text := _bad(loss):
        return f"the loss is {text} although every layer's output is finite"
    return _bad_gradient(strategy)


def _check_layer(causes: list[str], name: str, module: nn.Module, inputs: Any, output: Any) -> None:
    if causes:
        return
    where = f"{name or 'the model'} ({type(module).__name__})"
    # The inputs are checked too, because they may come from code between the layers.
    for place, values in (("input", inputs), ("output", output)):
        for value in values if isinstance(values, tuple) else (values,):
            if isinstance(value, Tensor) and value.is_floating_point() and (text := _bad(value)):
                causes.append(f"{text} first in the {place} of {where}")
                return


def _bad_gradient(strategy: Strategy) -> str:
    """Describes the last layer with a non-finite gradient, which the backward pass reaches first."""
    text = ""
    for name, parameter in strategy.bare.named_parameters():
        grad = parameter.grad
        if grad is not None and (bad := _bad(local_shard(grad))):
            text = f"{bad} first in the gradient of {name}"
    return text


def _bad(values: Tensor) -> str:
    if torch.isnan(values).any():
        return "NaN"
    return "infinity" if torch.isinf(values).any() else ""
