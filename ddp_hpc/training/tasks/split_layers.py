"""Splits the layers of a model into stages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from ddp_hpc.base.errors import RequestError


def split_evenly(layers: Sequence[nn.Module], num: int) -> list[tuple[Sequence[nn.Module], bool]]:
    """Groups consecutive layers into `num` stages with about equal numbers of parameters.

    Returns the layers of each stage, and whether the stage is the last one.

    Raises:
        RequestError: there are fewer than `num` layers.
    """
    if len(layers) < num:
        raise RequestError(
            f"the model has only {len(layers)} layers, but each of the {num} stages needs at least one"
        )
    sizes = [sum(p.numel() for p in layer.parameters()) for layer in layers]
    total, done = sum(sizes), 0
    ends: list[int] = []
    for i, size in enumerate(sizes):
        done += size
        stage = len(ends) + 1
        must = len(layers) - i - 1 == num - stage  # each remaining stage needs at least one layer
        if stage < num and (must or done * num >= stage * total):
            ends.append(i + 1)
    return [(layers[begin:end], end == len(layers)) for begin, end in pairwise([0, *ends, len(layers)])]
