"""The order of a long epoch looks like a shuffle, by statistics that do detect a cipher of fewer rounds.

Each statistic is a z score, about normally distributed for true shuffles. With all rounds its two-sided
p-value must be above 1e-3; with true shuffles, one such run of all tests in 300 would fail. With the
number of rounds that the statistic is known to detect it must be below 1e-9, so that each test can fail.
The seeds are fixed.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
from numpy.typing import NDArray

from ddp_hpc.data.sample_order import ROUNDS, EpochOrder, KeyedPermutation, epoch_keys

Numbers = NDArray[np.int64]

SIZE = 100_003  # a prime above STORED_UP_TO for which some numbers need cycle walking
LOW = 317  # the base of the cipher's low digit for this size
NUM_ORDERS, NUM_POSITIONS, NUM_BINS = 800, 1024, 16


def permutation(rounds: int, size: int = SIZE, seed: int = 0, epoch: int = 0) -> KeyedPermutation:
    return KeyedPermutation(size, epoch_keys(seed, epoch, rounds))


@cache
def beginnings(rounds: int, of: str) -> Numbers:
    """Returns the first samples of 800 consecutive seeds or epochs as a matrix (800, 1024)."""
    positions = np.arange(NUM_POSITIONS)
    return np.stack([permutation(rounds, **{of: i}).forward(positions) for i in range(NUM_ORDERS)])


def low(samples: Numbers) -> Numbers:
    """Returns the bins of the low digit, which depends least on a sample's position in the file."""
    return samples % LOW * NUM_BINS // LOW


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


def every_sample_is_as_likely_at_every_position(rounds: int, of: str) -> float:
    columns = low(beginnings(rounds, of)) + np.arange(NUM_POSITIONS) * NUM_BINS
    counts = np.bincount(columns.ravel(), minlength=NUM_POSITIONS * NUM_BINS)
    share = np.bincount(low(np.arange(SIZE)), minlength=NUM_BINS) / SIZE
    expected = np.tile(NUM_ORDERS * share, NUM_POSITIONS)
    return chi_square(counts, expected, NUM_POSITIONS * (NUM_BINS - 1))


def pairs_change_their_distance(rounds: int) -> float:
    """Of the pairs with equal high digits before, 1 in 64 keeps its distance in the low digit."""
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
    (every_sample_is_as_likely_at_every_position, ("seed",), 2),
    (every_sample_is_as_likely_at_every_position, ("epoch",), 2),
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
