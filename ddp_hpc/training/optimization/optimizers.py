"""The optimizer of a run, its groups of parameters, and the learning rate of each step. No strategy here."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ddp_hpc.errors import RequestError
from ddp_hpc.training.optimization.config import OptimizationConfig

# Rates fall to this share of the peak.
_FLOOR = 0.1


def optimizer_class(config: OptimizationConfig) -> type[torch.optim.Optimizer]:
    """What --optimizer names."""
    return {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[config.optimizer]


def optimizer_options(
    config: OptimizationConfig, device: torch.device, lr: float, *, has_parts: bool = False
) -> dict[str, Any]:
    """The arguments of its constructor. A fused one updates all parameters in one pass over memory.

    Without it a device updates many tensors by one kernel (foreach). torch does so by itself where it is told
    of neither, but not for the DTensors of fsdp; told `fused=False` alone it goes tensor by tensor.

    Args:
        config: of the run.
        device: of this rank.
        lr: at the beginning.
        has_parts: parameters are spread over ranks (DTensors), for which torch 2.13 has no fused SGD.

    Raises:
        RequestError: --fused was asked for, and torch does not have it.
    """
    options: dict[str, Any] = {"lr": lr}
    has_fused = not (config.optimizer == "sgd" and has_parts)
    if config.fused and not has_fused:
        raise RequestError(
            "--fused with --optimizer sgd: torch has no fused SGD for parameters that are spread over ranks; "
            "leave --fused out, or use --optimizer adamw"
        )
    if (device.type == "cuda" and has_fused) if config.fused is None else config.fused:
        options["fused"] = True
    elif device.type != "cpu":
        options["foreach"] = True
    if config.optimizer == "sgd":
        options["momentum"] = 0.9
    return options


def parameter_groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """All in one group; with a decay, matrices decay, and biases, norms and other vectors do not."""
    wanted = [parameter for parameter in parameters if parameter.requires_grad]
    if not weight_decay:
        return [{"params": wanted}]
    groups = [
        {"params": [p for p in wanted if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in wanted if p.dim() < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def lr_at(config: OptimizationConfig, step: int, num_ranks: int, total_steps: int) -> float:
    """The rate of a step, counted from 0: a straight ramp over the warm-up, then constant or a cosine.

    The cosine ends at a tenth of the peak with the last step.
    """
    peak = config.scaled_lr(num_ranks)
    if step < config.warmup_steps:
        return peak * (step + 1) / config.warmup_steps
    if config.lr_schedule == "constant":
        return peak
    share = (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps)
    return peak * (_FLOOR + (1 - _FLOOR) * 0.5 * (1 + math.cos(math.pi * min(1.0, share))))
