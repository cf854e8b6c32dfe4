"""Creates the optimizer and its parameter groups, and computes the learning rate of each step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ddp_hpc.base.errors import RequestError
from ddp_hpc.training.optimization.config import OptimizationConfig

# The cosine schedule ends at this fraction of the peak learning rate.
_FLOOR = 0.1


def optimizer_class(config: OptimizationConfig) -> type[torch.optim.Optimizer]:
    """Returns the optimizer class that --optimizer selects."""
    return {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[config.optimizer]


def optimizer_options(
    config: OptimizationConfig, device: torch.device, lr: float, *, is_sharded: bool = False
) -> dict[str, Any]:
    """Returns the arguments of the optimizer's constructor.

    A fused optimizer updates all parameters in one pass over memory. Otherwise a GPU updates many tensors
    with one kernel (foreach), which is set explicitly: torch's default does not use foreach for the
    DTensors of fsdp, nor with `fused=False`.

    Args:
        config: the options of the optimizer.
        device: this rank's device.
        lr: the initial learning rate.
        is_sharded: parameters are sharded over ranks (DTensors), for which torch 2.13 has no fused SGD.

    Raises:
        RequestError: --fused was requested, but torch does not support it here.
    """
    # Groups of parameters set their own; torch's AdamW has another default, 0.01.
    options: dict[str, Any] = {"lr": lr, "weight_decay": 0.0}
    has_fused = not (config.optimizer == "sgd" and is_sharded)
    if config.fused and not has_fused:
        raise RequestError(
            "--fused with --optimizer sgd: torch has no fused implementation of SGD for sharded parameters; "
            "omit --fused, or use --optimizer adamw"
        )
    if (device.type == "cuda" and has_fused) if config.fused is None else config.fused:
        options["fused"] = True
    elif device.type != "cpu":
        options["foreach"] = True
    if config.optimizer == "sgd":
        options["momentum"] = 0.9
    if config.cuda_graph:
        # A captured update reads the learning rate from the device. torch's fused kernel needs float32.
        options |= {"fused": True, "capturable": True}
        options["lr"] = torch.tensor(lr, dtype=torch.float32, device=device)
    return options


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Sets the learning rate of all parameter groups."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def parameter_groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Returns the optimizer's parameter groups. Vectors, such as biases, get no weight decay.

    Plain parameters, and parameters that are sharded over different meshes, are in different groups, because
    torch's fused and foreach kernels reject other lists: "got mixed torch.Tensor and DTensor", and torch 2.8
    "Could not run pointwise computation across different mesh".
    """
    of_meshes: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.requires_grad:
            of_meshes.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    groups: list[dict[str, Any]] = []
    for alike in of_meshes.values():
        if weight_decay:
            groups.append({"params": [p for p in alike if p.dim() >= 2], "weight_decay": weight_decay})
            groups.append({"params": [p for p in alike if p.dim() < 2], "weight_decay": 0.0})
        else:
            groups.append({"params": alike})
    return [group for group in groups if group["params"]] or [{"params": []}]


def lr_at(config: OptimizationConfig, step: int, num_ranks: int, total_steps: int) -> float:
    """Returns the learning rate of a step, counted from 0: a linear warm-up, then a constant or a cosine.

    The cosine reaches a tenth of the peak at the last step.
    """
    peak = config.scaled_lr(num_ranks)
    if step < config.warmup_steps:
        return peak * (step + 1) / config.warmup_steps
    if config.lr_schedule == "constant":
        return peak
    share = (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps)
    return peak * (_FLOOR + (1 - _FLOOR) * 0.5 * (1 + math.cos(math.pi * min(1.0, share))))
