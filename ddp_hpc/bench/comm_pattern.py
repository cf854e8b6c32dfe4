"""Whole numbers to send, of which every rank knows what comes back: no rounding, no tolerance.

Each rank has a table of its own, random and of prime length, which is laid out again and again. So
a block of another rank, from another place or of another time is found, and the sum of any number
of ranks costs no more than a sum of tables.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import Tensor

PERIOD = 8191
"""Elements of a table: a prime, or blocks of a power of two would look alike."""
_EXACT = {torch.float16: 2**11, torch.bfloat16: 2**8}
_MOST = 2**20  # which float32 and all integers hold exactly


def table(index: int, num_added: int, dtype: torch.dtype) -> Tensor:
    """What rank `index` of a group sends: int64 (PERIOD,), 0 or more.

    The numbers of `num_added` ranks add up, in any order, to what dtype holds exactly.
    """
    limit = _EXACT.get(dtype, _MOST)
    largest = max(1, limit // num_added)
    values = np.random.default_rng(index).integers(0, largest, PERIOD, endpoint=True)
    if num_added > limit:  # at each place so many ranks count as can be added
        values *= (index - np.arange(PERIOD)) % num_added < limit
    return torch.from_numpy(values)


@cache
def sum_table(num_ranks: int, dtype: torch.dtype) -> Tensor:
    """The sum of all ranks' tables: int64 (PERIOD,)."""
    total = torch.zeros(PERIOD, dtype=torch.int64)
    for index in range(num_ranks):
        total += table(index, num_ranks, dtype)
    return total


def lay_out(source: Tensor, start: int, count: int, like: Tensor) -> Tensor:
    """Elements start to start + count of a table without end: (count,), of `like`'s dtype and device."""
    turned = source.roll(-(start % PERIOD)).to(like.device, like.dtype)
    return turned.repeat(-(-count // PERIOD))[:count]
