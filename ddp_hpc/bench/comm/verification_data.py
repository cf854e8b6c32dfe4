"""Test data for collectives: integers whose results every rank can compute exactly.

The data of each rank repeats a random table of prime length. Blocks from a wrong rank, a wrong
position or an earlier call are therefore detected, and the expected sum over any number of ranks
is the sum of their tables.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import Tensor

PERIOD = 8191
"""Number of elements in a table. It is prime, so that blocks whose size is a power of two differ."""
_EXACT = {torch.float16: 2**11, torch.bfloat16: 2**8}
_MOST = 2**20  # integers up to this are exact in float32 and in all integer types


def table(index: int, num_added: int, dtype: torch.dtype) -> Tensor:
    """Returns the table of rank `index` in a group: non-negative int64 values of shape (PERIOD,).

    The sum of the tables of `num_added` ranks is exact in dtype for any order of summation.
    """
    limit = _EXACT.get(dtype, _MOST)
    largest = max(1, limit // num_added)
    values = np.random.default_rng(index).integers(0, largest, PERIOD, endpoint=True)
    if num_added > limit:  # at each position, only as many ranks as can be added have a non-zero value
        values *= (index - np.arange(PERIOD)) % num_added < limit
    return torch.from_numpy(values)


@cache
def sum_table(num_ranks: int, dtype: torch.dtype) -> Tensor:
    """Returns the sum of the tables of all ranks as int64 of shape (PERIOD,)."""
    total = torch.zeros(PERIOD, dtype=torch.int64)
    for index in range(num_ranks):
        total += table(index, num_ranks, dtype)
    return total


def fill_pattern(source: Tensor, start: int, count: int, like: Tensor) -> Tensor:
    """Returns the elements [start, start + count) of the repeated table in the dtype and device of `like`."""
    turned = source.roll(-(start % PERIOD)).to(like.device, like.dtype)
    return turned.repeat(-(-count // PERIOD))[:count]
