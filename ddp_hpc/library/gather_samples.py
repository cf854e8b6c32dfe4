"""Collects values of all ranks, for the metrics of a user's loop."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ddp_hpc.base.errors import RequestError
from ddp_hpc.library.batch import Batch, map_values
from ddp_hpc.training.process_group.group import Group

_MOST_AXES = 16


def gather_samples(group: Group, values: Any, batch: Batch) -> Any:
    """Returns the values of all samples of a step on every rank. Collective: every rank must call this.

    Raises:
        RequestError: a value is not a tensor with an axis of samples, or its other axes differ between ranks.
    """
    return map_values(partial(_gathered, group, batch.weight > 0), values)


def _gathered(group: Group, counts: bool, value: Any) -> Tensor:
    shape = tuple(value.shape) if isinstance(value, Tensor) else ()
    with group.failing_together():
        if not 1 <= len(shape) <= _MOST_AXES:
            seen = f"shape {shape}" if isinstance(value, Tensor) else f"type {type(value).__name__}"
            raise RequestError(
                f"world.gather_samples() got a value of {seen}; it needs tensors of shape (samples, ...). "
                "For a single number per rank, use world.gather or world.mean"
            )
    rows = len(value) if counts else 0
    own = torch.tensor([rows, len(shape), *shape[1:]] + [0] * (_MOST_AXES - len(shape)), device=group.device)
    of_ranks = group.gather(own).tolist()
    for rank, (_, *rest) in enumerate(of_ranks):
        if rest != of_ranks[0][1:]:
            theirs, first = ((..., *axes[1 : axes[0]]) for axes in (rest, of_ranks[0][1:]))
            group.agree(
                f"world.gather_samples(): the shape is {_text(theirs)} on rank {rank}, but {_text(first)} on "
                "rank 0; only the first axis may differ, so pad the values to the same length"
            )
    num_rows = [axes[0] for axes in of_ranks]
    padded = value.new_empty((max(num_rows), *shape[1:]), device=group.device)
    padded[:rows] = value.detach()[:rows]
    of_all_ranks = zip(group.gather(padded), num_rows, strict=True)
    return torch.cat([rows[:num] for rows, num in of_all_ranks])


def _text(shape: tuple[Any, ...]) -> str:
    return f"({', '.join('samples' if size is ... else str(size) for size in shape)})"
