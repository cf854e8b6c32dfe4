"""A model as a row of layers: which ones repeat, and how they are dealt to devices or ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from ddp_hpc.errors import RequestError
from ddp_hpc.training.snapshots.training_state import live_tensors
from ddp_hpc.training.tasks.task import Task


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The layers that a model repeats: children of its outermost ModuleLists and Sequentials."""
    found: list[nn.Module] = []

    def look(module: nn.Module) -> None:
        for child in module.children():
            if isinstance(child, nn.ModuleList | nn.Sequential):
                found.extend(block for block in child if any(True for _ in block.parameters()))
            else:
                look(child)

    if isinstance(model, nn.Sequential):
        return [block for block in model if any(True for _ in block.parameters())]
    look(model)
    return found


def split_stages(task: Task, num: int) -> Sequence[nn.Module]:
    """The model in `num` modules, applied one after another.

    Raises:
        RequestError: it does not say how to split it, or has a parameter in two of them.
    """
    if task.stages is not None:
        stages = task.stages(task.model, num)
    elif isinstance(task.model, nn.Sequential):
        stages = [nn.Sequential(*parts) for parts, _ in split_evenly(list(task.model), num)]
    else:
        raise RequestError(
            f"a {type(task.model).__name__} does not say how to split it in {num}: give its task `stages`, "
            "or make it an nn.Sequential"
        )
    if len(stages) != num:
        raise RequestError(f"the task's `stages` gave {len(stages)} modules, and {num} are needed")
    names = {id(tensor): name for name, tensor in live_tensors(task.model).items()}
    seen: dict[int, int] = {}
    for number, stage in enumerate(stages):
        for parameter in stage.parameters():
            if seen.setdefault(id(parameter), number) != number:
                raise RequestError(
                    f"{names.get(id(parameter), 'a parameter')} is in stages {seen[id(parameter)]} and "
                    f"{number}: stages cannot share a parameter; untie it"
                )
    return stages


def split_evenly(parts: Sequence[nn.Module], num: int) -> list[tuple[Sequence[nn.Module], bool]]:
    """The parts in `num` runs of about the same number of parameters, each with whether it is the last.

    Raises:
        RequestError: there are fewer parts.
    """
    if len(parts) < num:
        raise RequestError(
            f"the model has {len(parts)} layers to share, and {num} stages need at least one each"
        )
    sizes = [sum(p.numel() for p in part.parameters()) for part in parts]
    total, done = sum(sizes), 0
    ends: list[int] = []
    for i, size in enumerate(sizes):
        done += size
        stage = len(ends) + 1
        must = len(parts) - i - 1 == num - stage  # one part for each stage that is left
        if stage < num and (must or done * num >= stage * total):
            ends.append(i + 1)
    begins = [0, *ends]
    return [
        (parts[begin:end], end == len(parts)) for begin, end in zip(begins, [*ends, len(parts)], strict=True)
    ]


def checkpoint_activations(model: nn.Module) -> int:
    """Lets each layer compute its activations again in the backward pass; how many layers that are.

    Saves their memory for a third more computing. The module is changed in place and keeps its names.
    """
    blocks = blocks_of(model)
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return len(blocks)
