"""The order of an epoch: each sample once, random access to any part, and constant cost for any length."""

from __future__ import annotations

import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_hpc.data.sample_order import (
    BLOCK,
    STORED_UP_TO,
    EpochOrder,
    KeyedPermutation,
    epoch_keys,
    hash_below,
)

STORED, COMPUTED = 1000, STORED_UP_TO + 3 * BLOCK + 17
either_kind = pytest.mark.parametrize("num_samples", [STORED, COMPUTED])
keys = st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=9).map(tuple)


@pytest.mark.parametrize("num_samples", [1, 2, STORED, STORED_UP_TO, STORED_UP_TO + 1, COMPUTED, 10**6])
def test_each_sample_appears_once_per_epoch(num_samples):
    order = EpochOrder(num_samples, seed=3, epoch=2).take(0, num_samples)
    assert order.dtype == np.int64
    assert np.array_equal(np.sort(order), np.arange(num_samples))


@either_kind
def test_the_order_is_a_function_of_seed_and_epoch(num_samples):
    orders = {
        key: tuple(EpochOrder(num_samples, *key).take(0, 100))
        for key in [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (2, 0)]
    }
    assert len(set(orders.values())) == len(orders)
    assert tuple(EpochOrder(num_samples, 0, 1).take(0, 100)) == orders[0, 1]


def test_a_seed_of_more_than_32_bits_differs_from_another_seed_and_epoch():
    # NumPy's SeedSequence((5 * 2**32 + 1, 0)) equals SeedSequence((1, 5)).
    assert epoch_keys(5 * 2**32 + 1, 0) != epoch_keys(1, 5)


@pytest.mark.parametrize(
    ("num_samples", "start", "expected"),
    [
        (10, 0, [8, 0, 3, 7, 6, 4, 1, 5, 2, 9]),
        (65_536, 0, [40131, 19721, 64529, 49295]),
        (65_537, 0, [59118, 61442, 6935, 967]),
        (10**10, 0, [848521198, 8396903845, 3800356003]),
        (10**10, 9_999_999_996, [9332476807, 4864170836, 4844483221, 9164144051]),
        (2**62, 2**61, [2192125162264340054, 523115814863446701]),
    ],
)
def test_the_order_of_a_seed_never_changes(num_samples, start, expected):
    # Recorded values: a job that resumes after an upgrade or on another machine must see the remaining
    # samples.
    assert EpochOrder(num_samples, seed=0, epoch=0).take(start, start + len(expected)).tolist() == expected


@pytest.mark.check
@either_kind
@given(data=st.data())
def test_a_part_equals_the_slice_of_the_whole_order(num_samples, data):
    order = EpochOrder(num_samples, seed=0, epoch=0)
    whole = order.take(0, num_samples)
    for _ in range(5):  # forward and backward, within a block and across several
        start = data.draw(st.integers(0, num_samples))
        stop = data.draw(st.integers(start, num_samples))
        assert np.array_equal(order.take(start, stop), whole[start:stop])


def test_without_shuffle_samples_are_in_file_order():
    assert EpochOrder(10, seed=5, epoch=7, shuffle=False).take(3, 6).tolist() == [3, 4, 5]
    assert EpochOrder(10**10, seed=5, epoch=7, shuffle=False).take(10**10 - 1, 10**10).tolist() == [
        10**10 - 1
    ]


@either_kind
@pytest.mark.parametrize("shuffle", [True, False])
def test_positions_outside_the_epoch_are_an_error(num_samples, shuffle):
    order = EpochOrder(num_samples, 0, 0, shuffle)
    for span in [(-1, 3), (3, 2), (0, num_samples + 1), (num_samples + 1, num_samples + 2)]:
        with pytest.raises(IndexError):
            order.take(*span)


@pytest.mark.parametrize("num_samples", [STORED_UP_TO, STORED_UP_TO + 1, 10**10, 2**62])
def test_opening_an_epoch_allocates_less_than_a_megabyte(num_samples):
    tracemalloc.start()
    EpochOrder(num_samples, seed=0, epoch=0).take(num_samples // 2, num_samples // 2 + 32)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 2**20


def test_a_keyed_permutation_of_any_size_is_a_bijection():
    for size in [*range(1, 1500), 2**16 - 1, 2**16, 2**16 + 1, 999_983, 1_000_001]:
        moved = KeyedPermutation(size, epoch_keys(0, 0)).forward(np.arange(size))
        assert np.array_equal(np.bincount(moved), np.ones(size)), size


@given(size=st.integers(1, 2**62), keys=keys, data=st.data())
def test_a_keyed_permutation_can_be_inverted(size, keys, data):
    numbers = np.array(data.draw(st.lists(st.integers(0, size - 1), max_size=40)), dtype=np.int64)
    before = numbers.copy()
    permutation = KeyedPermutation(size, keys)
    moved = permutation.forward(numbers)
    assert moved.dtype == np.int64
    assert ((moved >= 0) & (moved < size)).all()
    assert [inverse(permutation, number) for number in moved.tolist()] == numbers.tolist()
    assert np.array_equal(numbers, before)  # the caller's array is not modified


def inverse(permutation, number):
    """Returns the number that the permutation maps to this one."""
    root = math.isqrt(permutation.size - 1) + 1
    bases = root, -(-permutation.size // root)
    while True:
        digits = [number % root, number // root]
        for index, key in reversed(list(enumerate(permutation.keys))):
            other = np.array([digits[1 - index % 2]], dtype=np.uint64)
            base = bases[index % 2]
            digits[index % 2] -= int(hash_below(np.uint64(base), other, np.uint64(key))[0])
            digits[index % 2] %= base
        number = digits[1] * root + digits[0]
        if number < permutation.size:
            return number
