"""The options of `world.loader`. If the script passes a DataLoader of torch, they are taken from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from ddp_hpc.base.errors import DataError
from ddp_hpc.library.sample_sources import WorkerOptions


@dataclass(frozen=True)
class LoaderOptions:
    """The options of a loader, except for those of the run."""

    batch_size: int = 32
    shuffle: bool = True
    drop_last: bool = False
    collate_fn: Callable[[list[Any]], Any] = default_collate
    sampler: Any = None
    """A sampler that determines the samples of an epoch and their order instead of `shuffle`."""
    workers: WorkerOptions = field(default_factory=WorkerOptions)


def options_for(data: Any, **given: Any) -> tuple[Any, LoaderOptions]:
    """Returns the data without its DataLoader, and the options, in which None means the default.

    Raises:
        DataError: the DataLoader has an option that this loader does not support, or `given` has some, too.
    """
    own = {name: value for name, value in given.items() if value is not None}
    if isinstance(data, DataLoader):
        if own:
            raise DataError(f"world.loader({next(iter(own))}=) got a DataLoader; set its own option instead")
        return data.dataset, _options_of(data)
    workers = WorkerOptions(own.pop("workers", 0))
    return data, LoaderOptions(**own, workers=workers)


def _options_of(loader: DataLoader[Any]) -> LoaderOptions:
    if type(loader.batch_sampler) is not BatchSampler:
        raise DataError(
            "world.loader() got a DataLoader with batch_sampler= or batch_size=None, but it divides each "
            "step among the ranks itself; use DataLoader(dataset, batch_size=..., collate_fn=...)"
        )
    sampler: Any = loader.sampler
    shuffle = False
    if isinstance(sampler, DistributedSampler):
        sampler, shuffle = None, sampler.shuffle
    elif isinstance(sampler, SequentialSampler):
        sampler = None
    elif isinstance(sampler, RandomSampler) and not sampler.replacement and sampler._num_samples is None:
        sampler, shuffle = None, True
    assert loader.batch_size is not None
    return LoaderOptions(
        batch_size=loader.batch_size,
        shuffle=shuffle,
        drop_last=loader.drop_last,
        collate_fn=loader.collate_fn,
        sampler=sampler,
        workers=WorkerOptions(
            loader.num_workers,
            loader.prefetch_factor,
            loader.multiprocessing_context,
            loader.worker_init_fn,
        ),
    )


class SamplerOrder:
    """The order of an epoch according to a sampler, as a function of the seed and the epoch."""

    def __init__(self, sampler: Any, seed: int, epoch: int) -> None:
        self.epoch = epoch
        # Samplers draw from their own generator or from torch's, whose state must not change.
        drawn = int(np.random.SeedSequence((seed, epoch)).generate_state(1, np.uint64)[0] >> np.uint64(1))
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        if isinstance(generator := getattr(sampler, "generator", None), torch.Generator):
            generator.manual_seed(drawn)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(drawn)
            self._numbers = np.fromiter(sampler, np.int64)

    def take(self, start: int, stop: int | None) -> NDArray[np.int64]:
        """Returns the numbers of the samples at the positions [start, stop) of the epoch."""
        return self._numbers[start:stop]
