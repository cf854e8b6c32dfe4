"""The order of samples in an epoch: a function of (seed, epoch) alone, the same on every rank.

A long epoch's order is computed, not stored: the sample at a position follows from the position
and some keys, so that opening an epoch of 10^10 samples, or going on in its middle, costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.random import Generator, Philox, SeedSequence
from numpy.typing import NDArray

from ddp_hpc.data.batches import Position, Share

# tests/data/test_order_statistics.py sees patterns in one epoch of up to 5 rounds, and in some hundred
# whole epochs of 6. Each further pair of rounds makes what is left fainter by sqrt(num_samples).
ROUNDS = 8
# Half a megabyte, and half a millisecond to shuffle.
STORED_UP_TO = 2**16
# NumPy's cost per call, 40 us for a batch of 32, spreads over a block. Much larger ones leave the cache.
BLOCK = 4096

# MurmurHash3's 64-bit finaliser (Austin Appleby, public domain). Of the three shifts the outer two are
# left out: the first would only be another key here, the last does not reach the upper half.
_MULTIPLY_1, _SHIFT, _MULTIPLY_2 = np.uint64(0xFF51AFD7ED558CCD), np.uint64(33), np.uint64(0xC4CEB9FE1A85EC53)
_UPPER_HALF = np.uint64(32)


@dataclass(frozen=True)
class KeyedPermutation:
    """A bijection of the numbers below `size`, computed for any of them in constant time and memory.

    A generalised Feistel network after Black and Rogaway, "Ciphers with Arbitrary Finite Domains"
    (2002): a number is written with two digits of about sqrt(size) values, and each round adds a
    hash of one digit to the other. `keys` are 64-bit numbers, one a round. It stands in for a
    shuffle, not for encryption: who knows some of the order may work out the rest.

    Raises:
        ValueError: on construction, for a size outside 1 to 2**62.
    """

    size: int
    keys: tuple[int, ...]

    def __post_init__(self) -> None:
        # Digits below 2**31 leave room for 32 bits of hash beside them in 64.
        if not 1 <= self.size <= 2**62:
            raise ValueError(f"a permutation of {self.size} numbers; between 1 and 2**62 are possible")

    def forward(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where each number of a 1-d array goes. A new array.

        Raises:
            IndexError: for numbers outside 0 to size.
        """
        return self._inside(numbers, backward=False)

    def inverse(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """The numbers that `forward` takes to these.

        Raises:
            IndexError: for numbers outside 0 to size.
        """
        return self._inside(numbers, backward=True)

    def _inside(self, numbers: NDArray[np.int64], backward: bool) -> NDArray[np.int64]:
        unsigned = numbers.astype(np.uint64)  # negative ones become the largest
        if int(unsigned.max(initial=0)) >= self.size:
            raise IndexError(f"a permutation of {self.size} numbers has none outside 0 to {self.size - 1}")
        moved = self._rounds(unsigned, backward)
        # Two digits can write up to sqrt(size) numbers too many. What lands there is sent on until it is
        # back inside, which it comes to be: it runs on a cycle, and started inside.
        while len(outside := np.flatnonzero(moved >= np.uint64(self.size))):
            moved[outside] = self._rounds(moved[outside], backward)
        return moved.astype(np.int64)

    def _rounds(self, numbers: NDArray[np.uint64], backward: bool) -> NDArray[np.uint64]:
        root = math.isqrt(self.size - 1) + 1
        low_base, high_base = np.uint64(root), np.uint64(-(-self.size // root))
        high = numbers // low_base
        low = numbers - high * low_base
        turns = list(enumerate(self.keys))
        for turn, key in reversed(turns) if backward else turns:
            digit, other, base = (high, low, high_base) if turn % 2 else (low, high, low_base)
            added = _hash_below(base, other, np.uint64(key))
            digit += base - added if backward else added
            # Modulo base without a division: where the difference is negative it wraps to a huge number.
            np.minimum(digit, digit - base, out=digit)
        return high * low_base + low


def _hash_below(base: np.uint64, digits: NDArray[np.uint64], key: np.uint64) -> NDArray[np.uint64]:
    """A number below `base` for each digit; no value is favoured by more than base / 2**32."""
    hashed = digits ^ key
    hashed *= _MULTIPLY_1
    hashed ^= hashed >> _SHIFT
    hashed *= _MULTIPLY_2
    hashed >>= _UPPER_HALF
    hashed *= base
    hashed >>= _UPPER_HALF
    return hashed


def epoch_keys(seed: int, epoch: int, rounds: int = ROUNDS) -> tuple[int, ...]:
    """Keys that tell (seed, epoch) apart from every other such pair, the same on every platform."""
    keys = SeedSequence(seed, spawn_key=(epoch,)).generate_state(rounds, np.uint64)
    return tuple(keys.tolist())


@dataclass(frozen=True)
class EpochOrder:
    """Each sample's number once, in the order in which this epoch visits them.

    Up to `STORED_UP_TO` samples this is NumPy's shuffle, where every order is as likely as any
    other. Beyond, it is a `KeyedPermutation`: of few elements that would favour some orders, of
    many no statistic of its tests tells it from a shuffle.
    """

    num_samples: int
    seed: int
    epoch: int
    shuffle: bool = True
    _held: dict[int, NDArray[np.int64]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def take(self, start: int, stop: int) -> NDArray[np.int64]:
        """The numbers of the samples at positions `start` up to, not including, `stop` of the epoch.

        Any part may be asked for at any time, at the same cost. The array is the caller's own.

        Raises:
            IndexError: for positions outside 0 to num_samples.
        """
        if not 0 <= start <= stop <= self.num_samples:
            raise IndexError(f"positions {start} to {stop} of {self.num_samples} samples")
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
        """The numbers at `first` and on. The last block is kept: the next batch mostly lies in it too."""
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


def sample_numbers(
    steps: Iterable[tuple[Position, tuple[Share, ...]]], num_samples: int, seed: int, shuffle: bool
) -> Iterator[NDArray[np.int64]]:
    """The numbers of the samples of each micro-batch of the steps, as `deal` gives them.

    A rank without a sample in an uneven tail takes one all the same, of weight 0: the others'
    allreduce waits for its backward.
    """
    order: EpochOrder | None = None
    for position, shares in steps:
        if order is None or order.epoch != position.epoch:
            order = EpochOrder(num_samples, seed, position.epoch, shuffle)
        for share in shares:
            yield order.take(min(share.start, share.stop - 1), share.stop)
