"""How the positions of an epoch are dealt to steps, micro-batches and ranks.

    global batch  = batch_size * world_size * accumulate positions: one optimizer step
    micro-batch   = batch_size * world_size positions of it: one forward and backward on every rank
    share         = batch_size positions of that: what one rank reads

One rank with batch 32 and two ranks with batch 16 see the same global batches.
At the end of an epoch less may be left: it is split as evenly as possible, never
padded, and the weights make each sample count the same. All functions are pure
and need no communication: every rank computes its own share.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Position:
    """How far a run is: between two optimizer steps."""

    step: int = 0  # that were done
    epoch: int = 0
    begin: int = 0
    """Samples of the epoch that were used: the next step's first position."""
    samples: int = 0  # that were used, over all epochs

    def after(self, share: Share, num_samples: int) -> Position:
        """The position after the step of which `share` is a part."""
        begin = self.begin + share.step_samples
        ends = begin == num_samples
        return Position(
            self.step + 1, self.epoch + ends, 0 if ends else begin, self.samples + share.step_samples
        )


@dataclass(frozen=True)
class Share:
    """The positions `start` up to `stop` of an epoch that one rank takes in one micro-batch, maybe none."""

    start: int
    stop: int
    step_samples: int
    """Samples of the whole step, over all ranks and micro-batches."""


def steps_left(
    num_samples: int, batch_size: int, world_size: int, accumulate: int, epochs: int, position: Position
) -> int:
    """Optimizer steps from `position` to the end of the last epoch; an epoch's last may be a smaller one."""
    global_batch = _global_batch(num_samples, batch_size, world_size, accumulate)
    if position.epoch >= epochs:
        return 0
    whole = epochs - position.epoch - 1
    return -(-(num_samples - position.begin) // global_batch) + whole * -(-num_samples // global_batch)


def micro_batches(
    num_samples: int, batch_size: int, world_size: int, rank: int, accumulate: int, begin: int
) -> tuple[Share, ...]:
    """This rank's shares of the step that begins at position `begin` of the epoch, one for each micro-batch.

    Every rank gets equally many, so that collective calls match; in the last step
    of an epoch there may be fewer, and a share may be empty.

    Raises:
        ValueError: for a rank or a position that does not exist.
    """
    global_batch = _global_batch(num_samples, batch_size, world_size, accumulate)
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} of {world_size}")
    end = min(begin + global_batch, num_samples)
    if not 0 <= begin < end:
        raise ValueError(f"position {begin} of an epoch of {num_samples} samples")
    micro = batch_size * world_size
    shares = []
    for first in range(begin, end, micro):
        per_rank, more = divmod(min(first + micro, end) - first, world_size)
        # The first `more` ranks take one sample more.
        start = first + rank * per_rank + min(rank, more)
        shares.append(Share(start, start + per_rank + (rank < more), end - begin))
    return tuple(shares)


def deal(
    num_samples: int, batch_size: int, world_size: int, rank: int, accumulate: int, position: Position
) -> Iterator[tuple[Position, tuple[Share, ...]]]:
    """Each step from `position` on, without an end: where it begins, and this rank's shares of it."""
    while True:
        shares = micro_batches(num_samples, batch_size, world_size, rank, accumulate, position.begin)
        yield position, shares
        position = position.after(shares[0], num_samples)


def weight(share: Share, world_size: int) -> float:
    """The factor for this share's mean loss before backward.

    DDP averages gradients over ranks, and gradients of micro-batches add up; with
    this factor the result is the gradient of the mean over all samples of the
    step. Exactly 1.0 for even shares without accumulation; 0.0 for an empty one.
    """
    return (share.stop - share.start) * world_size / share.step_samples


def _global_batch(num_samples: int, batch_size: int, world_size: int, accumulate: int) -> int:
    if min(num_samples, batch_size, world_size, accumulate) < 1:
        raise ValueError(
            f"num_samples {num_samples}, batch_size {batch_size}, world_size {world_size} and "
            f"accumulate {accumulate} all have to be at least 1"
        )
    return batch_size * world_size * accumulate
