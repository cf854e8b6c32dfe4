"""The order of a long epoch looks like a shuffle, by statistics that do detect a cipher of fewer rounds.

Each statistic is a z score, about normally distributed for true shuffles. With all rounds its two-sided
p-value must be above 1e-3; with true shuffles, one such run of all tests in 60 would fail. With the
number of rounds that the statistic is known to detect it must be below 1e-9, so that each test can fail.
The seeds are fixed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
from numpy.typing import NDArray

from ddp_hpc.data.sample_order import ROUNDS, EpochOrder, KeyedPermutation, epoch_keys

Numbers = NDArray[np.int64]

SIZE = 100_003  # a prime above STORED_UP_TO for which some numbers need cycle walking
LOW, HIGH = 317, 316  # the bases of the cipher's two digits for this size
NUM_ORDERS, NUM_POSITIONS, NUM_BINS = 800, 1024, 16


def permutation(rounds: int, size: int = SIZE, seed: int = 0, epoch: int = 0) -> KeyedPermutation:
    return KeyedPermutation(size, epoch_keys(seed, epoch, rounds))


@cache
def beginnings(rounds: int, of: str) -> Numbers:
    """Returns the first samples of 800 consecutive seeds or epochs as a matrix (800, 1024)."""
    positions = np.arange(NUM_POSITIONS)
    return np.stack([permutation(rounds, **{of: i}).forward(positions) for i in range(NUM_ORDERS)])


@cache
def whole(rounds: int) -> Numbers:
    return permutation(rounds).forward(np.arange(SIZE))


def high(samples: Numbers) -> Numbers:
    """Returns which sixteenth of the file each sample is in."""
    return samples * NUM_BINS // SIZE


def low(samples: Numbers) -> Numbers:
    """Returns the bins of the low digit, which depends least on a sample's position in the file."""
    return samples % LOW * NUM_BINS // LOW


def share(view: Callable[[Numbers], Numbers]) -> NDArray[np.float64]:
    """Returns the fraction of all samples in each bin."""
    return np.bincount(view(np.arange(SIZE)), minlength=NUM_BINS) / SIZE


def chi_square(counts: NDArray[np.int64], expected: NDArray[np.float64], freedom: int) -> float:
    """Returns Pearson's statistic as a z score, by the cube-root method of Wilson and Hilferty (1931)."""
    per_freedom = float(((counts - expected) ** 2 / expected).sum()) / freedom
    return (per_freedom ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))


def poisson(count: int, expected: float) -> float:
    return (count - expected) / math.sqrt(expected)


def p_value(z: float) -> float:
    return math.erfc(abs(z) / math.sqrt(2))


def equal_pairs(values: Numbers) -> int:
    counts = np.unique(values, return_counts=True)[1]
    return int((counts * (counts - 1) // 2).sum())


def every_sample_is_as_likely_at_every_position(rounds: int, of: str, view: Callable) -> float:
    columns = view(beginnings(rounds, of)) + np.arange(NUM_POSITIONS) * NUM_BINS
    counts = np.bincount(columns.ravel(), minlength=NUM_POSITIONS * NUM_BINS)
    expected = np.tile(NUM_ORDERS * share(view), NUM_POSITIONS)
    return chi_square(counts, expected, NUM_POSITIONS * (NUM_BINS - 1))


def pairs_of_bins(first: Numbers, second: Numbers, view: Callable) -> float:
    counts = np.bincount((view(first) * NUM_BINS + view(second)).ravel(), minlength=NUM_BINS**2)
    expected = first.size * np.outer(share(view), share(view)).ravel()
    return chi_square(counts, expected, NUM_BINS**2 - 1)


def neighbors_are_independent(rounds: int, view: Callable) -> float:
    orders = beginnings(rounds, "epoch")
    return pairs_of_bins(orders[:, ::2], orders[:, 1::2], view)


def samples_stay_where_they_were_as_often_as_by_chance(rounds: int) -> float:
    """The number of fixed points of an order has a Poisson distribution of mean 1."""
    num_orders, positions = 600, np.arange(2003)
    fixed = [
        int((permutation(rounds, len(positions), epoch=epoch).forward(positions) == positions).sum())
        for epoch in range(num_orders)
    ]
    counts = np.bincount(np.minimum(fixed, 5), minlength=6)
    chance = np.array([math.exp(-1) / math.factorial(k) for k in range(5)])
    return chi_square(counts, num_orders * np.append(chance, 1 - chance.sum()), 5)


def neighbors_lie_at_any_distance(rounds: int) -> float:
    counts = np.bincount(np.diff(whole(rounds)) % LOW, minlength=LOW)
    return chi_square(counts, np.full(LOW, (SIZE - 1) / LOW), LOW - 1)


def pairs_alike_in_the_high_digit_change_their_distance(rounds: int) -> float:
    """Of the pairs with equal high digits before and after, 1 in 317 keeps its distance in the low digit."""
    positions, samples = np.arange(SIZE), whole(rounds)
    alike = positions // LOW * HIGH + samples // LOW
    kept = equal_pairs(alike * LOW + (samples - positions) % LOW)
    return poisson(kept, SIZE * (LOW - 1) / 2 / (LOW * HIGH))


def pairs_change_their_distance(rounds: int) -> float:
    """As above, without the condition on the new high digit, over 800 short epochs: the most sensitive."""
    base, positions = 64, np.arange(64 * 64)
    before = positions // base * base
    kept = 0
    for epoch in range(NUM_ORDERS):
        samples = permutation(rounds, len(positions), epoch=epoch).forward(positions)
        counts = np.bincount(before + (samples - positions) % base)
        kept += int((counts * (counts - 1) // 2).sum())
    # Of the 4095 other samples, 64 have a given distance modulo 64 from a sample.
    return poisson(kept, NUM_ORDERS * equal_pairs(before) * base / (len(positions) - 1))


STATISTICS = [
    # the statistic, its arguments, and the largest number of rounds in which it detects a pattern
    (every_sample_is_as_likely_at_every_position, ("seed", high), 1),
    (every_sample_is_as_likely_at_every_position, ("seed", low), 2),
    (every_sample_is_as_likely_at_every_position, ("epoch", high), 1),
    (every_sample_is_as_likely_at_every_position, ("epoch", low), 2),
    (neighbors_are_independent, (high,), 3),
    (neighbors_are_independent, (low,), 2),
    (samples_stay_where_they_were_as_often_as_by_chance, (), 3),
    (neighbors_lie_at_any_distance, (), 4),
    (pairs_alike_in_the_high_digit_change_their_distance, (), 5),
    (pairs_change_their_distance, (), 6),
]


@pytest.mark.parametrize(("statistic", "of", "detected_up_to"), STATISTICS)
def test_orders_look_like_shuffles(statistic, of, detected_up_to):
    assert p_value(statistic(ROUNDS, *of)) > 1e-3


@pytest.mark.parametrize(("statistic", "of", "detected_up_to"), STATISTICS)
def test_the_statistic_detects_a_cipher_of_fewer_rounds(statistic, of, detected_up_to):
    assert p_value(statistic(detected_up_to, *of)) < 1e-9


def test_the_cipher_has_two_rounds_more_than_any_statistic_detects():
    assert max(detected_up_to for _, _, detected_up_to in STATISTICS) + 2 <= ROUNDS


def test_the_statistics_use_the_orders_of_real_epochs():
    for of in ("seed", "epoch"):
        key = {"seed": 0, "epoch": 0, of: 5}
        assert np.array_equal(EpochOrder(SIZE, **key).take(0, NUM_POSITIONS), beginnings(ROUNDS, of)[5])
