"""Which positions of the epoch a step trains on, and which rank takes which of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_hpc.data.batches import Share, micro_batches, steps_per_epoch, weight

SIZES = {
    "num_samples": st.integers(1, 400),
    "batch_size": st.integers(1, 17),
    "world_size": st.integers(1, 9),
    "accumulate": st.integers(1, 5),
}


@given(**SIZES)
def test_no_sample_is_repeated_or_left_out(num_samples, batch_size, world_size, accumulate):
    taken = [
        position
        for step in range(steps_per_epoch(num_samples, batch_size, world_size, accumulate))
        for shares in zip(
            *(
                micro_batches(num_samples, batch_size, world_size, rank, accumulate, step)
                for rank in range(world_size)
            ),
            strict=True,  # every rank has as many micro-batches
        )
        for share in shares
        for position in range(share.start, share.stop)
    ]
    # In order too: over micro-batches first, then over ranks.
    assert taken == list(range(num_samples))


@given(**SIZES, data=st.data())
def test_shares_differ_by_one_sample_at_most(num_samples, batch_size, world_size, accumulate, data):
    steps = steps_per_epoch(num_samples, batch_size, world_size, accumulate)
    step = data.draw(st.integers(0, steps - 1))
    by_rank = [
        micro_batches(num_samples, batch_size, world_size, rank, accumulate, step)
        for rank in range(world_size)
    ]
    for shares in zip(*by_rank, strict=True):
        sizes = [share.stop - share.start for share in shares]
        assert max(sizes) <= batch_size
        assert max(sizes) - min(sizes) <= 1
        assert max(sizes) > 0


@given(**SIZES, data=st.data())
def test_weighted_means_averaged_over_ranks_are_the_mean_of_the_step(
    num_samples, batch_size, world_size, accumulate, data
):
    steps = steps_per_epoch(num_samples, batch_size, world_size, accumulate)
    step = data.draw(st.integers(0, steps - 1))
    losses = np.arange(num_samples, dtype=np.float64) ** 2
    by_rank = np.zeros(world_size)
    seen: list[int] = []
    for rank in range(world_size):
        for share in micro_batches(num_samples, batch_size, world_size, rank, accumulate, step):
            mine = losses[share.start : share.stop]
            if len(mine):
                by_rank[rank] += weight(share, world_size) * mine.mean()
            else:
                assert weight(share, world_size) == 0.0
            seen += range(share.start, share.stop)
    assert by_rank.mean() == pytest.approx(losses[seen].mean(), rel=1e-12)


@given(batch_size=st.integers(1, 300), world_size=st.integers(1, 300), accumulate=st.integers(1, 7))
def test_even_shares_weigh_one_over_accumulate_exactly(batch_size, world_size, accumulate):
    num_samples = batch_size * world_size * accumulate
    for share in micro_batches(num_samples, batch_size, world_size, world_size - 1, accumulate, 0):
        assert weight(share, world_size) == 1.0 / accumulate


@pytest.mark.parametrize(
    ("batch_size", "world_size", "accumulate"), [(32, 1, 1), (16, 2, 1), (8, 4, 1), (16, 1, 2), (4, 4, 2)]
)
def test_a_step_covers_the_same_positions_in_every_world(batch_size, world_size, accumulate):
    assert steps_per_epoch(100, batch_size, world_size, accumulate) == 4
    for step in range(4):
        shares = [
            share
            for rank in range(world_size)
            for share in micro_batches(100, batch_size, world_size, rank, accumulate, step)
        ]
        assert min(share.start for share in shares) == 32 * step
        assert max(share.stop for share in shares) == min(32 * (step + 1), 100)


def test_a_tail_smaller_than_the_world_leaves_some_ranks_nothing():
    assert [micro_batches(10, 2, 4, rank, 1, 1) for rank in range(4)] == [
        (Share(8, 9, 2),),
        (Share(9, 10, 2),),
        (Share(10, 10, 2),),
        (Share(10, 10, 2),),
    ]


@pytest.mark.parametrize(
    "arguments",
    [
        (10, 2, 4, 4, 1, 0),
        (10, 2, 4, -1, 1, 0),
        (10, 2, 4, 0, 1, 2),
        (10, 2, 4, 0, 1, -1),
        (0, 2, 4, 0, 1, 0),
        (10, 0, 4, 0, 1, 0),
        (10, 2, 0, 0, 1, 0),
        (10, 2, 4, 0, 0, 0),
    ],
)
def test_what_does_not_exist_is_an_error(arguments):
    with pytest.raises(ValueError, match=r"rank|step|at least 1"):
        micro_batches(*arguments)
