"""Timing of loaders: in turns, and without batches that were read before."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from ddp_hpc.bench.data_loading.interleaved_timing import Source, measure
from ddp_hpc.bench.data_loading.loaders import Batches, Order

ORDER = [np.arange(2), np.arange(2, 4)]


def source(name: str, log: list[str], sleep_s: float = 0.0, **options: Any) -> Source:
    """A source that records in `log` when it is opened, read and closed."""

    def open_it(order: Order) -> Batches:
        log.append(f"open {name}")
        try:
            while True:
                log.append(name)
                time.sleep(sleep_s)
                yield torch.zeros(1), torch.zeros(1)
        finally:
            log.append(f"close {name}")

    return Source(name, "memory", open_it, **options)


def test_sources_take_turns_after_a_warm_up_epoch_and_are_closed_at_the_end() -> None:
    log: list[str] = []
    times = measure([source("a", log), source("b", log)], ORDER, rounds=2, seconds=0)
    warm_up = ["open a", "a", "a", "open b", "b", "b"]
    assert log == [*warm_up, "a", "b", "a", "b", "close b", "close a"]
    assert [len(taken) for taken in times] == [2, 2], "the warm-up does not count"


def test_batches_read_ahead_are_consumed_before_timing_starts() -> None:
    log: list[str] = []
    measure([source("a", log, ahead=3)], ORDER, rounds=1, seconds=0)
    timed = 2 * 3
    assert log.count("a") == 2 * (3 + timed), "a warm-up and a turn"


def test_the_batches_of_one_read_are_timed_together() -> None:
    log: list[str] = []
    one = source("a", log, at_once=5)
    [times] = measure([one], ORDER, rounds=2, seconds=0)
    assert (one.together, len(times), log.count("a")) == (5, 2, 15)
