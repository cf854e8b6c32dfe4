"""Partitions the positions of an epoch into steps, micro-batches and the shares of the ranks.

    global batch  = the positions of one optimizer step
    micro-batch   = batch_size * world_size positions of a global batch: one forward and backward pass
    share         = batch_size positions of a micro-batch: read by one rank

One rank with batch size 32 and two ranks with batch size 16 see the same global batches.
The last micro-batch of a step, and the last global batch of an epoch, may be smaller. They are
split as evenly as possible and never padded, and the weights make each sample count the same.
All functions are pure and need no communication: every rank computes its own share.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Position:
    """The progress of a run between two optimizer steps."""

    step: int = 0
    """Number of completed steps."""
    epoch: int = 0
    begin: int = 0
    """Number of samples of this epoch already used, which is the first position of the next step."""
    samples: int = 0
    """Number of samples used in all epochs so far."""

    def after(self, share: Share, num_samples: int) -> Position:
        """Returns the position after the step that `share` belongs to."""
        begin = self.begin + share.step_samples
        ends = begin == num_samples
        return Position(
            self.step + 1, self.epoch + ends, 0 if ends else begin, self.samples + share.step_samples
        )


@dataclass(frozen=True)
class Share:
    """The positions from `start` to `stop` - 1 that one rank reads for one micro-batch; may be empty."""

    start: int
    stop: int
    step_samples: int
    """Number of samples in the whole step, over all ranks and micro-batches."""


def steps_left(num_samples: int, global_batch: int, epochs: int, position: Position) -> int:
    """Returns the number of optimizer steps from `position` to the end of the last epoch.

    The last step of an epoch may have a smaller global batch.
    """
    if position.epoch >= epochs:
        return 0
    whole = epochs - position.epoch - 1
    return -(-(num_samples - position.begin) // global_batch) + whole * -(-num_samples // global_batch)


def micro_batches(
    num_samples: int, batch_size: int, world_size: int, rank: int, global_batch: int, begin: int
) -> tuple[Share, ...]:
    """Returns this rank's shares of the step that begins at position `begin`, one for each micro-batch.

    Every rank gets the same number of shares, so that collective calls match. The last
    step of an epoch may have fewer micro-batches, and a share may be empty.
    """
    end = min(begin + global_batch, num_samples)
    micro = batch_size * world_size
    shares = []
    for first in range(begin, end, micro):
        per_rank, remainder = divmod(min(first + micro, end) - first, world_size)
        # The first `remainder` ranks get one extra sample.
        start = first + rank * per_rank + min(rank, remainder)
        shares.append(Share(start, start + per_rank + (rank < remainder), end - begin))
    return tuple(shares)


def rank_shares(
    num_samples: int, batch_size: int, world_size: int, rank: int, global_batch: int, position: Position
) -> Iterator[tuple[Position, tuple[Share, ...]]]:
    """Yields the start position and this rank's shares of each step from `position` on, without an end."""
    while True:
        shares = micro_batches(num_samples, batch_size, world_size, rank, global_batch, position.begin)
        yield position, shares
        position = position.after(shares[0], num_samples)


def weight(share: Share, world_size: int) -> float:
    """Returns the factor to scale this share's mean loss by before backward.

    DDP averages gradients over ranks, and the gradients of micro-batches add up. With
    this factor the result is the gradient of the mean over all samples of the step.
    It is exactly 1.0 for even shares without accumulation and 0.0 for an empty share.
    """
    return (share.stop - share.start) * world_size / share.step_samples
