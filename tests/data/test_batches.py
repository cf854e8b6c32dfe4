"""The partition of an epoch's positions into steps, micro-batches and ranks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_hpc.data.step_shards import Position, Share, micro_batches, steps_left, weight

SIZES = {
    "num_samples": st.integers(1, 400),
    "batch_size": st.integers(1, 17),
    "world_size": st.integers(1, 9),
    "global_batch": st.integers(1, 150),
}


def steps_of(num_samples, batch_size, world_size, global_batch, position, epochs):
    """Yields the shares of all ranks and micro-batches for each step to the end of the last epoch."""
    while position.epoch < epochs:
        by_rank = [
            micro_batches(num_samples, batch_size, world_size, rank, global_batch, position.begin)
            for rank in range(world_size)
        ]
        yield position, by_rank
        position = position.after(by_rank[0][0], num_samples)


@given(**SIZES, data=st.data())
def test_no_sample_is_repeated_or_left_out(num_samples, batch_size, world_size, global_batch, data):
    # The first position is arbitrary, since a resumed run may have a different number of ranks.
    begin = data.draw(st.integers(0, num_samples - 1))
    start = Position(step=7, epoch=1, begin=begin, samples=0)
    steps = list(steps_of(num_samples, batch_size, world_size, global_batch, start, epochs=3))
    taken = [
        (before.epoch, position)
        for before, by_rank in steps
        for shares in zip(*by_rank, strict=True)  # all ranks have the same number of micro-batches
        for share in shares
        for position in range(share.start, share.stop)
    ]
    # They are also in order: first over micro-batches, then over ranks.
    whole = [(epoch, position) for epoch in (1, 2) for position in range(num_samples)]
    assert taken == whole[begin:]
    assert len(steps) == steps_left(num_samples, global_batch, 3, start)
    assert [before.step for before, _ in steps] == list(range(7, 7 + len(steps)))


def test_a_position_counts_steps_epochs_and_samples():
    share = Share(0, 4, 8)
    assert Position(3, 0, 24, 24).after(share, 32) == Position(4, 1, 0, 32)
    assert Position(3, 0, 16, 16).after(share, 32) == Position(4, 0, 24, 24)


def test_no_steps_are_left_after_the_last_epoch():
    assert steps_left(10, 2, 3, Position(15, 3, 0, 30)) == 0
    assert steps_left(10, 2, 3, Position(20, 4, 0, 40)) == 0


@given(**SIZES, data=st.data())
def test_shares_differ_by_one_sample_at_most(num_samples, batch_size, world_size, global_batch, data):
    begin = data.draw(st.integers(0, num_samples - 1))
    by_rank = [
        micro_batches(num_samples, batch_size, world_size, rank, global_batch, begin)
        for rank in range(world_size)
    ]
    for shares in zip(*by_rank, strict=True):
        sizes = [share.stop - share.start for share in shares]
        assert max(sizes) <= batch_size
        assert max(sizes) - min(sizes) <= 1
        assert max(sizes) > 0


@given(**SIZES, data=st.data())
def test_weighted_means_averaged_over_ranks_are_the_mean_of_the_step(
    num_samples, batch_size, world_size, global_batch, data
):
    begin = data.draw(st.integers(0, num_samples - 1))
    losses = np.arange(num_samples, dtype=np.float64) ** 2
    by_rank = np.zeros(world_size)
    seen: list[int] = []
    for rank in range(world_size):
        for share in micro_batches(num_samples, batch_size, world_size, rank, global_batch, begin):
            mine = losses[share.start : share.stop]
            if len(mine):
                by_rank[rank] += weight(share, world_size) * mine.mean()
            else:
                assert weight(share, world_size) == 0.0
            seen += range(share.start, share.stop)
    assert by_rank.mean() == pytest.approx(losses[seen].mean(), rel=1e-12)


@pytest.mark.parametrize(
    ("batch_size", "world_size"), [(32, 1), (16, 2), (8, 4), (16, 1), (4, 4), (8, 3), (5, 3)]
)
def test_a_step_covers_the_same_positions_in_every_world(batch_size, world_size):
    assert steps_left(100, 32, 1, Position()) == 4
    for step in range(4):
        shares = [
            share
            for rank in range(world_size)
            for share in micro_batches(100, batch_size, world_size, rank, 32, 32 * step)
        ]
        assert min(share.start for share in shares) == 32 * step
        assert max(share.stop for share in shares) == min(32 * (step + 1), 100)
