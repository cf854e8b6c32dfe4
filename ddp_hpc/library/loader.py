"""`world.loader`: batches for a user's loop, with the order, sharding and read-ahead of the trainer."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from torch import Tensor
from torch.profiler import record_function

from ddp_hpc.data.in_memory import check_workers, samples_of_arrays
from ddp_hpc.data.sample_order import sample_numbers
from ddp_hpc.data.samples import Samples
from ddp_hpc.data.step_shards import Position, Share, rank_shares, steps_left, weight
from ddp_hpc.errors import DataError, RequestError
from ddp_hpc.training.config import TrainConfig
from ddp_hpc.training.health.heartbeat import RESTING
from ddp_hpc.training.input.batch_loader import Loader
from ddp_hpc.training.input.prepare_data import open_data
from ddp_hpc.training.process_group.group import mismatch_between_ranks

if TYPE_CHECKING:
    from ddp_hpc.library.world import ConnectedWorld

Data: TypeAlias = str | Path | tuple[Any, Any]


class Batch(NamedTuple):
    """One rank's samples of a step, on its device, in the dtypes of the data."""

    src: Tensor
    """The inputs, of shape (samples, ...)."""
    tgt: Tensor
    """The targets, of shape (samples, ...)."""
    weight: float
    """The factor by which the mean loss of this batch must be multiplied before backward. DDP averages the
    gradients over ranks; with this factor, each sample of the step has the same effect. It is 1.0 except in a
    smaller last step of an epoch, and 0.0 for a rank without samples in that step, which gets another sample
    so that it can take part in the backward pass.
    """
    step: int
    """The number of the step, counted from 1 over all epochs."""
    epoch: int
    """The number of the epoch, counted from 1."""
    ends_epoch: bool
    """Whether this is the last step of the epoch."""


class WorldLoader:
    """This rank's batches, for one `for` over all epochs. Created by `world.loader`.

    After a `break`, another `for` continues with the next batch. All ranks must take the same
    number of batches.
    """

    def __init__(
        self, world: ConnectedWorld, samples: Samples, config: TrainConfig, position: Position
    ) -> None:
        self._world, self._samples, self.config = world, samples, config
        self.position = position
        """The position after the last returned batch."""
        self._at_end = False

    @property
    def num_samples(self) -> int:
        """The number of samples per epoch, over all ranks."""
        return self._samples.num_samples

    @property
    def samples(self) -> Samples:
        """The samples that are loaded."""
        return self._samples

    @property
    def num_steps(self) -> int:
        """The total number of steps of all epochs."""
        return self.position.step + len(self)

    def __len__(self) -> int:
        """Returns the number of remaining batches."""
        config = self.config
        return steps_left(
            self.num_samples, config.data.batch_size, self._world.world_size, 1, config.epochs, self.position
        )

    def __iter__(self) -> Iterator[Batch]:
        """Iterates over the batches from `position` on.

        Raises:
            RequestError: an earlier `for` has iterated over all epochs.
        """
        if self._at_end:
            raise RequestError(
                f"this loader is exhausted: one `for` iterates over all {self.config.epochs} epoch(s). "
                "Use world.loader(..., epochs=N) with batch.epoch and batch.ends_epoch"
            )
        return self._batches()

    def _batches(self) -> Generator[Batch, None, None]:
        world, config = self._world, self.config
        reader = Loader(
            self._samples, world.device, workers=config.data.workers, timeout_s=config.process_group.timeout_s
        )
        numbers = sample_numbers(self._steps(), self.num_samples, config.seed, config.data.shuffle)
        batches = reader.batches(numbers)
        try:
            for at, (share,) in self._steps():
                after = at.after(share, self.num_samples)
                world.at(after.step, "data")
                with record_function("data"):
                    src, tgt = next(batches)
                    if world.device.type == "cpu":
                        # The reader reuses its buffers, but a script can keep its batches.
                        src, tgt = src.clone(), tgt.clone()
                world.at(after.step, "script")
                self.position = after
                factor = weight(share, world.world_size)
                yield Batch(src, tgt, factor, after.step, at.epoch + 1, after.epoch > at.epoch)
            self._at_end = True
        finally:
            batches.close()
            world.at(self.position.step, RESTING)

    def _steps(self) -> Iterator[tuple[Position, tuple[Share, ...]]]:
        """Yields the remaining steps. The reader iterates over them ahead of `_batches`."""
        config, world = self.config, self._world
        shares = rank_shares(
            self.num_samples, config.data.batch_size, world.world_size, world.rank, 1, self.position
        )
        return takewhile(lambda step: step[0].epoch < config.epochs, shares)


def open_loader(world: ConnectedWorld, data: Data, config: TrainConfig, start_step: int) -> WorldLoader:
    """Opens a loader of the same data on all ranks. Collective: every rank must call this.

    Raises:
        RequestError: the data is missing or damaged, or differs between ranks.
    """
    group = world.group
    in_file = config.data.path is not None
    samples = (
        open_data(config, group, world.progress) if in_file else _in_memory(world, data, config.data.workers)
    )
    request = f"{config.epochs} epochs of {samples.num_samples} samples by {config.data.batch_size}"
    order = f"shuffle={config.data.shuffle}, seed={config.seed}, start_step={start_step}"
    group.agree(mismatch_between_ranks(group.comm, f"{request}, {order}"))
    if start_step < 0:
        raise RequestError(f"start_step must be 0 or greater (got {start_step})")
    position = _position_at(start_step, samples.num_samples, config.data.batch_size * world.world_size)
    return WorldLoader(world, samples, config, position)


def with_config(loader: WorldLoader | None, config: TrainConfig) -> TrainConfig:
    """Returns the configuration with the data, seed and epochs of the loader."""
    if loader is None:
        return config
    theirs = loader.config
    return replace(config, data=theirs.data, seed=theirs.seed, epochs=theirs.epochs)


def _in_memory(world: ConnectedWorld, data: Data, workers: int) -> Samples:
    with world.group.failing_together():
        if not isinstance(data, tuple) or len(data) != 2:
            raise DataError(
                f"world.loader() does not accept {type(data).__name__}; "
                "pass a file path or a pair (inputs, targets) of tensors"
            )
        check_workers(workers)
        return samples_of_arrays(*data)


def _position_at(step: int, num_samples: int, global_batch: int) -> Position:
    epoch, done = divmod(step, -(-num_samples // global_batch))
    begin = done * global_batch
    return Position(step, epoch, begin, epoch * num_samples + begin)
