"""How ranks and the supervisor agree on how long a run has been silent (--idle-timeout)."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from ddp_hpc.discovery.python_stacks import Frame
from ddp_hpc.discovery.silence import (
    Silence,
    SilentRank,
    open_period_s,
    period_s,
    read_reports,
    write_report,
)

LIMIT_S = 100.0


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now_s)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def look(watcher: Silence, clock: Clock, after_s: float, *, is_active: bool = False) -> float:
    clock.now_s += after_s
    return watcher.look(is_active=is_active)


def test_the_output_of_one_rank_ends_the_silence_of_all(tmp_path: Path, clock: Clock) -> None:
    quiet, busy = Silence(tmp_path, LIMIT_S), Silence(tmp_path, LIMIT_S)
    for watcher in (busy, quiet):
        watcher.look(is_active=watcher is busy)
    assert look(quiet, clock, 10) == 10
    assert look(quiet, clock, 10) == 20
    assert look(busy, clock, 0, is_active=True) == 0
    assert look(quiet, clock, 10) == 0
    assert look(quiet, clock, 10) == 10


def test_the_file_is_touched_only_if_no_other_rank_has_done_so(tmp_path: Path, clock: Clock) -> None:
    one, other = Silence(tmp_path, LIMIT_S), Silence(tmp_path, LIMIT_S)
    one.look(is_active=True)
    os.utime(tmp_path / "activity", ns=(1, 1))
    other.look(is_active=True)
    assert (tmp_path / "activity").stat().st_mtime_ns == 1
    look(other, clock, 10, is_active=True)
    assert (tmp_path / "activity").stat().st_mtime_ns > 1


def test_a_suspended_job_was_not_silent(tmp_path: Path, clock: Clock) -> None:
    watcher = Silence(tmp_path, LIMIT_S)
    watcher.look(is_active=True)
    assert look(watcher, clock, 10) == 10
    assert look(watcher, clock, 3600) <= 40


def test_a_file_system_that_cannot_be_read_is_not_silence(tmp_path: Path, clock: Clock) -> None:
    watcher = Silence(tmp_path / "missing", LIMIT_S)
    watcher.look(is_active=True)
    assert look(watcher, clock, 10) == 0


def test_reports_are_read_as_they_were_written_and_damaged_ones_are_left_out(tmp_path: Path) -> None:
    frames = (Frame("train.py", 3, "main"),)
    report = SilentRank(
        rank=11, world_size=12, host="n1", state="S", cpu_share=0.5, same_s=3.0, frames=frames
    )
    assert write_report(tmp_path, report, "the stacks\n") == tmp_path / "rank-11.txt"
    write_report(tmp_path, SilentRank(**{**vars(report), "rank": 2}), "")
    (tmp_path / "rank-1.txt").write_text('{"rank": 1')
    assert read_reports(tmp_path) == [SilentRank(**{**vars(report), "rank": 2}), report]
    assert (tmp_path / "rank-11.txt").read_text().endswith("\n\nthe stacks\n")


@pytest.mark.parametrize(
    ("limit_s", "world_size", "expected_s"),
    [(100.0, 16, 10.0), (1800.0, 16, 30.0), (1800.0, 8000, 64.0), (60.0, 8000, 15.0)],
)
def test_very_many_ranks_look_less_often(limit_s: float, world_size: int, expected_s: float) -> None:
    assert period_s(limit_s, world_size) == expected_s
    assert world_size / open_period_s(world_size) == 500
