"""Reports of a slow rank."""

import pytest

from ddp_hpc.training.health.slow_rank import SlowRankDetector

SLOW = """
import os
import time

from torch import nn

from ddp_hpc.training.tasks.task import Task


def net():
    rank, slow = os.environ.get("RANK", "0"), os.environ.get("SLOW_RANK")

    def forward(model, src, tgt):
        if rank == slow:
            time.sleep(0.05)
        return model(src)

    def loss(output, tgt):
        return (output - tgt).square().mean()

    return Task(model=nn.Linear(20, 1), loss=loss, forward=forward)

"""
WORDS = ["--src-shape", "20", "--tgt-shape", "1", "--num-samples", "96", "--batch-size", "4", "--epochs", "1"]


@pytest.fixture
def mine(tmp_path):
    (tmp_path / "mine.py").write_text(SLOW)
    return tmp_path


def test_a_slow_rank_is_reported_once_with_its_node_and_times(mine, forks):
    words = [*WORDS, "--model", "mine:net", "--log-every", "2"]
    job = forks.run(*words, cwd=mine, ranks=3, env={"SLOW_RANK": "2"})
    (line,) = (line for line in job.words().splitlines() if "is slow" in line)
    assert line.startswith("note: rank 2 on ")
    assert 0.05 <= float(line.split("passes take ")[1].split(" s")[0]) < 0.5


def test_ranks_of_equal_speed_are_not_reported():
    skew = SlowRankDetector(1.5, ["n1", "n1", "n2"])
    assert all(skew.check([0.010, 0.012, 0.014], 0.1) == "" for _ in range(10))


def test_three_consecutive_slow_reports_are_reported_once():
    skew = SlowRankDetector(1.5, ["n1", "n1", "n2"])
    slow, fine = [0.01, 0.01, 0.09], [0.01, 0.01, 0.01]
    told = [skew.check(own_s, 0.1) for own_s in (slow, slow, fine, slow, slow, slow, slow)]
    assert [bool(text) for text in told] == [False] * 5 + [True, False]
    assert "rank 2 on n2 is slow" in told[5]


def test_a_delay_that_does_not_affect_the_step_is_not_reported():
    skew = SlowRankDetector(1.5, ["n1", "n2"])
    assert all(skew.check([0.0001, 0.0009], 1.0) == "" for _ in range(5))


def test_of_two_ranks_the_slower_is_reported():
    skew = SlowRankDetector(1.5, ["n1", "n2"])
    assert "rank 0 on n1" in [skew.check([0.09, 0.01], 0.1) for _ in range(3)][-1]
