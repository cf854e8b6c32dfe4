"""Finds the repeated layers of a model, and divides its layers among devices or ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from ddp_hpc.base.errors import RequestError
from ddp_hpc.training.snapshots.training_state import live_tensors
from ddp_hpc.training.tasks.split_layers import split_evenly
from ddp_hpc.training.tasks.task import Task


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Returns the layers that a model repeats: the children of its outermost ModuleLists and Sequentials."""
    blocks: list[nn.Module] = []

    def look(module: nn.Module) -> None:
        for child in module.children():
            if isinstance(child, nn.ModuleList | nn.Sequential):
                blocks.extend(block for block in child if any(True for _ in block.parameters()))
            else:
                look(child)

    if isinstance(model, nn.Sequential):
        return [block for block in model if any(True for _ in block.parameters())]
    look(model)
    return blocks


def split_stages(task: Task, num: int) -> Sequence[nn.Module]:
    """Splits the model into `num` modules that are applied one after another.

    Raises:
        RequestError: the model cannot be split into `num` stages, or two stages share a parameter.
    """
    if task.stages is not None:
        stages = task.stages(task.model, num)
    elif isinstance(task.model, nn.Sequential):
        stages = [nn.Sequential(*layers) for layers, _ in split_evenly(list(task.model), num)]
    else:
        raise RequestError(
            f"{type(task.model).__name__} cannot be split into {num} stages: define `stages` in the task, "
            "or make the model an nn.Sequential"
        )
    if len(stages) != num:
        raise RequestError(f"the task's `stages` returned {len(stages)} modules, but {num} are needed")
    names = {id(tensor): name for name, tensor in live_tensors(task.model).items()}
    seen: dict[int, int] = {}
    for number, stage in enumerate(stages):
        for parameter in stage.parameters():
            if seen.setdefault(id(parameter), number) != number:
                raise RequestError(
                    f"{names.get(id(parameter), 'a parameter')} is in stages {seen[id(parameter)]} and "
                    f"{number}, but stages cannot share a parameter; use a separate parameter in each stage"
                )
    return stages


def checkpoint_activations(model: nn.Module) -> int:
    """Makes each layer recompute its activations in the backward pass; returns the number of layers.

    This saves memory, but needs a third more computation. The model is changed in place; names do not change.
    """
    blocks = blocks_of(model)
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return len(blocks)
