"""`world.loader`: batches for a user's loop, with the order, sharding and read-ahead of the trainer."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from itertools import count, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import IterableDataset, default_collate

from ddp_hpc.base.errors import DataError, RequestError
from ddp_hpc.data.in_memory import check_workers, samples_of_arrays
from ddp_hpc.data.sample_order import EpochOrder, sample_numbers
from ddp_hpc.data.step_shards import Position, Share, rank_shares, steps_left, weight
from ddp_hpc.library.batch import Batch, make_batch
from ddp_hpc.library.loader_options import LoaderOptions, SamplerOrder, options_for
from ddp_hpc.library.sample_sources import (
    DatasetSource,
    PairSource,
    Source,
    Wanted,
    reads_items,
)
from ddp_hpc.training.config import TrainConfig
from ddp_hpc.training.health.heartbeat import RESTING
from ddp_hpc.training.prepare_data import open_data
from ddp_hpc.training.process_group.group import mismatch_between_ranks
from ddp_hpc.training.telemetry.trace_annotations import annotated

if TYPE_CHECKING:
    from ddp_hpc.library.connected_world import ConnectedWorld


class WorldLoader:
    """This rank's batches, for one `for` loop over all epochs. Created by `world.loader`.

    After a `break`, another `for` loop continues with the next batch. All ranks must take the same
    number of batches.
    """

    def __init__(
        self,
        world: ConnectedWorld,
        source: Source,
        config: TrainConfig,
        options: LoaderOptions,
        num_samples: int,
        position: Position,
    ) -> None:
        self._world, self._source, self.config, self._options = world, source, config, options
        self.num_samples = num_samples
        """The number of samples per epoch, over all ranks."""
        self.position = position
        """The position after the last returned batch."""
        self._at_end = False

    @property
    def num_steps(self) -> int:
        """The total number of steps of all epochs."""
        return self.position.step + len(self)

    @property
    def _global_batch(self) -> int:
        return self.config.global_batch(self._world.world_size)

    def __len__(self) -> int:
        """Returns the number of remaining batches."""
        config, position = self.config, self.position
        left = steps_left(self.num_samples, self._global_batch, config.epochs, position)
        return left if config.max_steps is None else min(left, max(0, config.max_steps - position.step))

    def __iter__(self) -> Iterator[Batch]:
        """Iterates over the batches from `position` on.

        Raises:
            RequestError: an earlier `for` loop has iterated over all epochs.
        """
        if self._at_end:
            raise RequestError(
                f"this loader is exhausted, because one `for` loop iterates over all {self.num_steps} steps; "
                "use world.loader(..., epochs=N), and batch.epoch or batch.ends_epoch"
            )
        return self._batches()

    def _batches(self) -> Generator[Batch, None, None]:
        world = self._world
        try:
            with closing(self._source.batches(self._wanted(), world.device)) as batches:
                for at, (share,) in self._steps():
                    after = at.after(share, self.num_samples)
                    world.at(after.step, "data")
                    with annotated("data"):
                        data = next(batches)
                    world.at(after.step, "script")
                    self.position = after
                    factor = weight(share, world.world_size)
                    yield make_batch(data, factor, after.step, at.epoch + 1, after.epoch > at.epoch)
            self._at_end = True
        finally:
            world.at(self.position.step, RESTING)

    def _steps(self) -> Iterator[tuple[Position, tuple[Share, ...]]]:
        """Yields the remaining steps. The source iterates over them ahead of `_batches`."""
        config, world = self.config, self._world
        shares = rank_shares(
            self.num_samples, config.data.batch_size, world.world_size, world.rank, self._global_batch,
            self.position,
        )  # fmt: skip
        last = sys.maxsize if config.max_steps is None else config.max_steps
        return takewhile(lambda step: step[0].epoch < config.epochs and step[0].step < last, shares)

    def _wanted(self) -> Wanted:
        """Returns the samples of the remaining batches, each with a seed for the worker that reads it."""
        seed, rank = self.config.seed, self._world.rank
        seeds = (_derived((seed, rank), step) for step in count(self.position.step))
        return zip(seeds, sample_numbers(self._steps(), self._order), strict=False)

    def _order(self, epoch: int) -> EpochOrder | SamplerOrder:
        seed, options = self.config.seed, self._options
        if options.sampler is None:
            # With drop_last, the steps of the epoch do not reach the last samples in this order.
            return EpochOrder(self._source.num_samples, seed, epoch, options.shuffle)
        return SamplerOrder(options.sampler, seed, epoch)


def open_loader(
    world: ConnectedWorld, data: Any, own: dict[str, Any], settings: dict[str, Any], start_step: int
) -> WorldLoader:
    """Opens a loader of the same data on all ranks. Collective: every rank must call this.

    `own` are the options that a DataLoader can also have.

    Raises:
        RequestError: the data is missing or damaged, or differs between ranks.
    """
    group, timeout_s = world.group, world.config.process_group.timeout_s
    with group.failing_together():
        data, options = options_for(data, **own)
        config = TrainConfig.of(
            data=Path(data) if isinstance(data, str | Path) else None,
            batch_size=options.batch_size,
            shuffle=options.shuffle,
            workers=options.workers.num_workers,
            timeout=timeout_s,
            **settings,
        )
        if start_step < 0:
            raise RequestError(f"start_step must be 0 or greater (got {start_step})")
    source: Source
    if config.data.path is not None:
        source = PairSource(open_data(config, group, world.progress), config.data.workers, timeout_s)
    with group.failing_together():
        if config.data.path is None:
            source = _source_of(data, options, timeout_s)
        num_samples, order = _epoch_of(source.num_samples, config, options, world.world_size)
    length = f"{config.epochs} epochs" if config.max_steps is None else f"{config.max_steps} steps"
    request = f"{length}, {num_samples} samples by {options.batch_size}"
    order = f"shuffle={options.shuffle}, seed={config.seed}, start_step={start_step}{order}"
    group.agree(mismatch_between_ranks(group.comm, f"{request}, {order}"))
    position = _position_at(start_step, num_samples, options.batch_size * world.world_size)
    return WorldLoader(world, source, config, options, num_samples, position)


def with_config(loader: WorldLoader | None, config: TrainConfig) -> TrainConfig:
    """Returns the configuration with the data, seed and epochs of the loader."""
    if loader is None:
        return config
    theirs = loader.config
    return replace(config, data=theirs.data, seed=theirs.seed, epochs=theirs.epochs)


def _source_of(data: Any, options: LoaderOptions, timeout_s: float) -> Source:
    """Returns the source of data in memory.

    Raises:
        DataError: it is neither a Dataset nor a pair of arrays, or it has no samples.
    """
    workers = options.workers
    if isinstance(data, tuple) and len(data) == 2:
        check_workers(workers.num_workers)
        if options.collate_fn is not default_collate:
            raise DataError(
                "collate_fn= combines samples of a Dataset, but this data is a pair of arrays; omit "
                "collate_fn"
            )
        return PairSource(samples_of_arrays(*data), workers=0, timeout_s=timeout_s)
    if isinstance(data, tuple | Mapping) or (
        isinstance(data, list) and len(data) == 2 and all(hasattr(value, "__array__") for value in data)
    ):
        raise DataError(
            f"world.loader() got a {type(data).__name__} of {len(data)} values; pass a tuple (inputs, "
            "targets) of two arrays, a TensorDataset of several tensors, or another Dataset"
        )
    is_dataset = hasattr(data, "__getitem__") and hasattr(data, "__len__") and not hasattr(data, "__array__")
    if isinstance(data, IterableDataset) or not is_dataset:
        raise DataError(
            f"world.loader() does not accept {type(data).__name__}; pass a file path, a Dataset with __len__ "
            "and __getitem__, a DataLoader over such a Dataset, or a tuple (inputs, targets) of two arrays"
        )
    if not len(data):
        raise DataError("the dataset has no samples; at least one is required")
    return DatasetSource(reads_items(data, options.collate_fn), len(data), timeout_s, workers)


def _epoch_of(num: int, config: TrainConfig, options: LoaderOptions, world_size: int) -> tuple[int, str]:
    """Returns the number of samples of an epoch, and a description of a sampler's first epoch.

    Raises:
        DataError: the sampler does not yield valid sample numbers, or an epoch has no step.
    """
    order = ""
    if options.sampler is not None:
        numbers, name = (
            SamplerOrder(options.sampler, config.seed, 0).take(0, None),
            type(options.sampler).__name__,
        )
        if not len(numbers) or numbers.min() < 0 or numbers.max() >= num:
            raise DataError(
                f"the sampler {name} must yield numbers from 0 to {num - 1}, at least one per epoch"
            )
        num = len(numbers)
        order = f", {name} {zlib.crc32(numbers.tobytes()):08x}"
    global_batch = options.batch_size * world_size
    if options.drop_last and num < global_batch:
        raise DataError(
            f"drop_last=True leaves no step: a step needs {global_batch} samples (batch_size "
            f"{options.batch_size} on {world_size} ranks), but an epoch has {num}"
        )
    return num - num % global_batch * options.drop_last, order


def _derived(seed: tuple[int, ...], step: int) -> int:
    """Returns a seed of 63 bits that is unique to the rank and the step."""
    return int(
        np.random.SeedSequence(seed, spawn_key=(step,)).generate_state(1, np.uint64)[0] >> np.uint64(1)
    )


def _position_at(step: int, num_samples: int, global_batch: int) -> Position:
    epoch, done = divmod(step, -(-num_samples // global_batch))
    begin = done * global_batch
    return Position(step, epoch, begin, epoch * num_samples + begin)
