"""The order of samples in an epoch, which depends on (seed, epoch) only and is the same on every rank.

The order of a long epoch is computed instead of stored: the sample at a position is a function of the
position and a few keys, so that starting an epoch of 10^10 samples, or resuming in its middle, takes
no time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.random import Generator, Philox, SeedSequence
from numpy.typing import NDArray

from ddp_hpc.data.step_shards import Position, Share

# tests/data/test_order_statistics.py detects patterns in several hundred epochs with up to 6 rounds. Two more
# rounds weaken the patterns by sqrt(num_samples).
ROUNDS = 8
# The order of up to this number of samples is stored. It takes half a megabyte, and half a millisecond to
# shuffle.
STORED_UP_TO = 2**16
# Number of positions that are permuted at once. Permuting each batch of 32 separately would take 40 us,
# almost all of which is the overhead of NumPy calls. Much larger blocks do not fit into the processor's
# cache.
BLOCK = 4096

# MurmurHash3's 64-bit finalizer (Austin Appleby, public domain), without its first and last shift: the
# first would only act as another key, and the last does not affect the upper half, the only part used.
_MULTIPLY_1, _SHIFT, _MULTIPLY_2 = np.uint64(0xFF51AFD7ED558CCD), np.uint64(33), np.uint64(0xC4CEB9FE1A85EC53)
_UPPER_HALF = np.uint64(32)


@dataclass(frozen=True)
class KeyedPermutation:
    """A permutation of the numbers below `size` that is computed, in constant time per number, not stored.

    This is a generalized Feistel network after Black and Rogaway, "Ciphers with Arbitrary Finite
    Domains" (2002): a number is written with two digits of about sqrt(size) values each, and each
    round adds a hash of one digit to the other. `keys` are 64-bit numbers, one per round. The
    permutation replaces a shuffle and is not encryption: part of the order may reveal the rest.

    With a size of up to 2**62, the product of a digit's base and a 32-bit hash fits into 64 bits.
    """

    size: int
    keys: tuple[int, ...]

    def forward(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the permuted numbers of a 1-d array of numbers from 0 to size - 1, in a new array."""
        moved = self._rounds(numbers.astype(np.uint64))
        # Two digits can represent up to about sqrt(size) numbers that are too large. Such a result is
        # permuted again until it is below `size` (cycle walking). This loop ends, because the cycle of the
        # permutation contains the number at which it started.
        while len(outside := np.flatnonzero(moved >= np.uint64(self.size))):
            moved[outside] = self._rounds(moved[outside])
        return moved.astype(np.int64)

    def _rounds(self, numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
        root = math.isqrt(self.size - 1) + 1
        low_base, high_base = np.uint64(root), np.uint64(-(-self.size // root))
        high = numbers // low_base
        low = numbers - high * low_base
        for index, key in enumerate(self.keys):
            digit, other, base = (high, low, high_base) if index % 2 else (low, high, low_base)
            digit += hash_below(base, other, np.uint64(key))
            # This computes the remainder modulo base without a division: a negative difference wraps around
            # to a huge number.
            np.minimum(digit, digit - base, out=digit)
        return high * low_base + low


def hash_below(base: np.uint64, digits: NDArray[np.uint64], key: np.uint64) -> NDArray[np.uint64]:
    """Returns a hash below `base` of each digit; the bias of any value is at most base / 2**32."""
    hashed = digits ^ key
    hashed *= _MULTIPLY_1
    hashed ^= hashed >> _SHIFT
    hashed *= _MULTIPLY_2
    hashed >>= _UPPER_HALF
    hashed *= base
    hashed >>= _UPPER_HALF
    return hashed


def epoch_keys(seed: int, epoch: int, rounds: int = ROUNDS) -> tuple[int, ...]:
    """Returns keys that are unique to (seed, epoch) and the same on every platform."""
    keys = SeedSequence(seed, spawn_key=(epoch,)).generate_state(rounds, np.uint64)
    return tuple(keys.tolist())


@dataclass(frozen=True)
class EpochOrder:
    """The order in which an epoch visits the samples, each of them once.

    NumPy shuffles up to `STORED_UP_TO` samples; all orders are equally likely. More samples are ordered
    by a `KeyedPermutation`: it would favor some orders of few elements, but for many elements, the
    statistical tests in tests/data cannot distinguish it from a shuffle.
    """

    num_samples: int
    seed: int
    epoch: int
    shuffle: bool = True
    _held: dict[int, NDArray[np.int64]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def take(self, start: int, stop: int) -> NDArray[np.int64]:
        """Returns the numbers of the samples at the positions [start, stop) of the epoch.

        Any part can be requested at any time, at the same cost. The caller may modify the result.

        Raises:
            IndexError: a position is not in the range 0 to num_samples.
        """
        if not 0 <= start <= stop <= self.num_samples:
            raise IndexError(f"positions {start} to {stop} are not in the range 0 to {self.num_samples}")
        if not self.shuffle:
            return np.arange(start, stop, dtype=np.int64)
        if self.num_samples <= STORED_UP_TO:
            return self._stored[start:stop].copy()
        taken = np.empty(stop - start, dtype=np.int64)
        for first in range(start - start % BLOCK, stop, BLOCK):
            begin, end = max(start, first), min(stop, first + BLOCK)
            taken[begin - start : end - start] = self._block(first)[begin - first : end - first]
        return taken

    def _block(self, first: int) -> NDArray[np.int64]:
        """Returns the block that begins at `first`, cached because the next batch is usually in it too."""
        block = self._held.get(first)
        if block is None:
            stop = min(first + BLOCK, self.num_samples)
            block = self._permutation.forward(np.arange(first, stop, dtype=np.int64))
            self._held.clear()
            self._held[first] = block
        return block

    @cached_property
    def _permutation(self) -> KeyedPermutation:
        return KeyedPermutation(self.num_samples, epoch_keys(self.seed, self.epoch))

    @cached_property
    def _stored(self) -> NDArray[np.int64]:
        stream = Generator(Philox(SeedSequence((self.seed, self.epoch))))
        return stream.permutation(np.int64(self.num_samples)).astype(np.int64, copy=False)


class Order(Protocol):
    """The order of the samples of an epoch."""

    @property
    def epoch(self) -> int:
        """The epoch, counted from 0."""

    def take(self, start: int, stop: int) -> NDArray[np.int64]:
        """Returns the numbers of the samples at the positions [start, stop) of the epoch."""


def sample_numbers(
    steps: Iterable[tuple[Position, tuple[Share, ...]]], order_of: Callable[[int], Order]
) -> Iterator[NDArray[np.int64]]:
    """Yields the numbers of the samples of each micro-batch of the steps that `rank_shares` yields.

    `order_of` returns the order of an epoch. A rank whose share of the last step is empty reads one sample
    anyway, with weight 0, because the allreduce of the other ranks waits for its backward pass.
    """
    order: Order | None = None
    for position, shares in steps:
        if order is None or order.epoch != position.epoch:
            order = order_of(position.epoch)
        for share in shares:
            yield order.take(min(share.start, share.stop - 1), share.stop)
