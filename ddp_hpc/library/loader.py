"""Batches for someone's own loop: the trainer's order, shares and reading ahead."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from torch import Tensor
from torch.profiler import record_function

from ddp_hpc.data.batches import Position, Share, deal, steps_left, weight
from ddp_hpc.data.in_memory import check_workers, samples_of_arrays
from ddp_hpc.data.order import sample_numbers
from ddp_hpc.data.samples import Samples
from ddp_hpc.errors import DataError, RequestError
from ddp_hpc.training.config import TrainConfig
from ddp_hpc.training.group import same_everywhere
from ddp_hpc.training.heartbeat import RESTING
from ddp_hpc.training.loader import Loader
from ddp_hpc.training.prepare import open_data

if TYPE_CHECKING:
    from ddp_hpc.library.world import ConnectedWorld

Data: TypeAlias = str | Path | tuple[Any, Any]


class Batch(NamedTuple):
    """One rank's samples of a step, on its device, in the data's types."""

    src: Tensor
    """(samples, ...)"""
    tgt: Tensor
    """(samples, ...)"""
    weight: float
    """The factor for the mean loss of this batch before backward: with it the mean of gradients over
    ranks, as DDP takes it, counts each sample of the step once. 1.0 but in an uneven last step of an
    epoch; 0.0 for a rank that has no sample left there, which gets another one to take part with.
    """
    step: int
    """From 1, over all epochs."""
    epoch: int
    """From 1."""
    ends_epoch: bool
    """Whether it is the epoch's last step."""


class WorldLoader:
    """This rank's batches, for one `for` over all epochs. Made by `world.loader`.

    A `for` that is left before its end can be gone on with by another one. All ranks have to ask
    for equally many batches.
    """

    def __init__(
        self, world: ConnectedWorld, samples: Samples, config: TrainConfig, position: Position
    ) -> None:
        self._world, self._samples, self.config = world, samples, config
        self.position = position
        """After the batch that was given last."""
        self._at_end = False

    @property
    def num_samples(self) -> int:
        """Of an epoch, over all ranks."""
        return self._samples.num_samples

    @property
    def samples(self) -> Samples:
        """What the batches are made of."""
        return self._samples

    @property
    def num_steps(self) -> int:
        """From the first step of the first epoch to the end of the last one."""
        return self.position.step + len(self)

    def __len__(self) -> int:
        """How many batches are still to come."""
        config = self.config
        return steps_left(
            self.num_samples, config.batch_size, self._world.world_size, 1, config.epochs, self.position
        )

    def __iter__(self) -> Iterator[Batch]:
        """The batches from `position` on.

        Raises:
            RequestError: all epochs were gone through by an earlier `for`.
        """
        if self._at_end:
            raise RequestError(
                f"this loader has given its {self.config.epochs} epoch(s) already; one `for` goes through "
                "all: give world.loader(..., epochs=N), and look at batch.epoch and batch.ends_epoch"
            )
        return self._batches()

    def _batches(self) -> Generator[Batch, None, None]:
        world, config = self._world, self.config
        reader = Loader(self._samples, world.device, workers=config.workers, timeout_s=config.timeout_s)
        numbers = sample_numbers(self._steps(), self.num_samples, config.seed, config.shuffle)
        batches = reader.batches(numbers)
        try:
            for at, (share,) in self._steps():
                after = at.after(share, self.num_samples)
                world.at(after.step, "data")
                with record_function("data"):
                    src, tgt = next(batches)
                    if world.device.type == "cpu":
                        # The reader's buffers are used again, and a script may keep what it gets.
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
        """Each step that is still to come. It is read ahead of `_batches`."""
        config, world = self.config, self._world
        dealt = deal(self.num_samples, config.batch_size, world.world_size, world.rank, 1, self.position)
        return takewhile(lambda step: step[0].epoch < config.epochs, dealt)


def open_loader(world: ConnectedWorld, data: Data, config: TrainConfig, start_step: int) -> WorldLoader:
    """The loader of the data, the same on all ranks. Collective: every rank must call this.

    Raises:
        RequestError: the data is missing, damaged, or another one on another rank.
    """
    group = world.group
    in_file = config.data is not None
    samples = open_data(config, group, world.progress) if in_file else _in_memory(world, data, config.workers)
    asked = f"{config.epochs} epochs of {samples.num_samples} samples by {config.batch_size}"
    order = f"shuffle={config.shuffle}, seed={config.seed}, start_step={start_step}"
    group.agree(same_everywhere(group.comm, f"{asked}, {order}"), RequestError.exit_code)
    if start_step < 0:
        raise RequestError(f"start_step={start_step}: has to be 0 or more")
    position = _position_at(start_step, samples.num_samples, config.batch_size * world.world_size)
    return WorldLoader(world, samples, config, position)


def with_config(loader: WorldLoader | None, config: TrainConfig) -> TrainConfig:
    """The config with what determines the loader's order."""
    if loader is None:
        return config
    theirs = loader.config
    return replace(
        config,
        data=theirs.data,
        batch_size=theirs.batch_size,
        seed=theirs.seed,
        shuffle=theirs.shuffle,
        epochs=theirs.epochs,
        src_key=theirs.src_key,
        tgt_key=theirs.tgt_key,
    )


def _in_memory(world: ConnectedWorld, data: Data, workers: int) -> Samples:
    problem, samples = "", None
    try:
        if not isinstance(data, tuple) or len(data) != 2:
            raise DataError(
                f"world.loader() got a {type(data).__name__}; "
                "a path or a pair (src, tgt) of tensors is needed"
            )
        samples = samples_of_arrays(*data)
        check_workers(workers)
    except RequestError as error:
        problem = str(error)
    world.group.agree(problem, RequestError.exit_code)
    assert samples is not None
    return samples


def _position_at(step: int, num_samples: int, global_batch: int) -> Position:
    epoch, done = divmod(step, -(-num_samples // global_batch))
    begin = done * global_batch
    return Position(step, epoch, begin, epoch * num_samples + begin)
