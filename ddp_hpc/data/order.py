"""The order of samples in an epoch: a function of (seed, epoch) alone, the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class EpochOrder:
    """Each sample's number once, in the order in which this epoch visits them."""

    num_samples: int
    seed: int
    epoch: int
    shuffle: bool = True

    def take(self, start: int, stop: int) -> NDArray[np.int64]:
        """The numbers of the samples at positions `start` up to, not including, `stop` of the epoch.

        Raises:
            IndexError: for positions outside 0 to num_samples.
        """
        if not 0 <= start <= stop <= self.num_samples:
            raise IndexError(f"positions {start} to {stop} of {self.num_samples} samples")
        if not self.shuffle:
            return np.arange(start, stop, dtype=np.int64)
        return self._order[start:stop].copy()

    @cached_property
    def _order(self) -> NDArray[np.int64]:
        stream = np.random.Generator(np.random.Philox(np.random.SeedSequence((self.seed, self.epoch))))
        return stream.permutation(np.int64(self.num_samples)).astype(np.int64, copy=False)
