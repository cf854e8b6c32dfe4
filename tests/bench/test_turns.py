"""How loaders are timed: in turns, without what lay ready, and anew where the cache is to be cold."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ddp_hpc.bench.loaders import Batches, Order
from ddp_hpc.bench.turns import Source, measure

ORDER = [np.arange(2), np.arange(2, 4)]


def source(name: str, log: list[str], sleep_s: float = 0.0, **options: Any) -> Source:
    """Batches that say in `log` whose they are, and when they begin and end."""

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


def test_rows_take_turns_after_a_warm_up_of_one_epoch_and_are_closed_at_the_end() -> None:
    log: list[str] = []
    times = measure([source("a", log), source("b", log)], ORDER, rounds=2, seconds=0)
    warm_up = ["open a", "a", "a", "open b", "b", "b"]
    assert log == [*warm_up, "a", "b", "a", "b", "close b", "close a"]
    assert [len(taken) for taken in times] == [2, 2], "the warm-up does not count"


def test_a_turn_lasts_as_long_as_asked() -> None:
    times = measure([source("a", [], sleep_s=0.01)], ORDER, rounds=1, seconds=0.1)
    assert 1 <= len(times[0]) <= 11
    assert min(times[0]) >= 0.01


def test_batches_that_lay_ready_are_taken_before_the_clock_starts() -> None:
    log: list[str] = []
    measure([source("a", log, ahead=3)], ORDER, rounds=1, seconds=0)
    timed = 2 * 3
    assert log.count("a") == 2 * (3 + timed), "a warm-up and a turn"


def test_batches_read_ahead_come_in_bursts_so_a_time_is_the_mean_of_several() -> None:
    one = source("a", [], sleep_s=0.005, workers=2, ahead=1)
    start = time.monotonic()
    times = measure([one], ORDER, rounds=1, seconds=0)
    wall_s = time.monotonic() - start
    assert one.together == 4
    assert len(times[0]) == 1
    assert 0.005 <= times[0][0] <= wall_s / 12, "12 batches in all"


def test_the_batches_of_one_read_are_timed_together() -> None:
    log: list[str] = []
    one = source("a", log, at_once=5)
    [times] = measure([one], ORDER, rounds=2, seconds=0)
    assert (one.together, len(times), log.count("a")) == (5, 2, 15)


def test_a_cold_turn_opens_anew_and_ends_with_the_epoch(tmp_path: Path) -> None:
    log: list[str] = []
    path = tmp_path / "data"
    path.write_bytes(b"x" * 4096)
    times = measure([source("a", log, path=path)], ORDER, rounds=2, seconds=60, cold=True)
    turn = ["close a", "open a", "a", "a"]
    assert log == ["open a", "a", "a", *turn, *turn, "close a"]
    assert len(times[0]) == 4
    assert path.read_bytes() == b"x" * 4096
