"""Ranks that share their connections to rank 0 through the relay of their node."""

import os
import re
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from tests.training.forked import Forks
from tests.training.runs import LINEAR, error_lines, succeeded, train

from .conftest import ConnectRanks, printed

RELAY = {"DDP_HPC_RELAY": "1"}
SIZES = [*LINEAR, "--num-samples", "720", "--batch-size", "4", "--epochs", "1", "--device", "cpu"]
PLANTED = [str(Path(__file__).parents[1] / "training" / "planted.py")]


def test_all_ranks_but_rank_0_use_the_relay_that_one_of_them_has_started(connect_ranks: ConnectRanks) -> None:
    ranks = printed(connect_ranks(6, **RELAY))
    assert [each["has_relay"] for each in ranks] == [False, True, True, True, True, True]
    assert sum(each["starts_relay"] for each in ranks) == 1
    assert len({(each["host"], each["port"]) for each in ranks}) == 1


def test_without_the_variable_few_ranks_use_no_relay(connect_ranks: ConnectRanks) -> None:
    assert not any(each["has_relay"] for each in printed(connect_ranks(2)))


def test_an_unknown_value_of_the_variable_ends_all_ranks(connect_ranks: ConnectRanks) -> None:
    ended = connect_ranks(3, DDP_HPC_RELAY="yes")
    assert "DDP_HPC_RELAY='yes' is not valid" in ended.stderr
    assert ended.exit_code != 0
    assert ended.wall_s < 20


def test_a_training_continues_after_its_relay_is_killed(tmp_path: Path, forks: Forks) -> None:
    env = RELAY | {"PLANT": "kill_relay:-1"}
    job = forks.start(*SIZES, cwd=tmp_path, ranks=4, program="tests.training.planted", env=env)
    assert job.wait() == [0] * 4, job.words()
    assert job.errors() == []


def test_a_stopped_rank_that_has_started_the_relay_is_reported(tmp_path: Path) -> None:
    # This test needs mpiexec, which kills the stopped process at the end.
    env = RELAY | {"PLANT": "stop_rank_with_relay:-1"}
    limits = ["--hang-timeout", "4", "--timeout", "60"]
    done = train(*SIZES, *limits, cwd=tmp_path, ranks=3, program=PLANTED, env=env)
    (line,) = error_lines(done)
    assert re.search(r"rank [12] on \S+ has been .*no answer: its process is stopped", line), line
    assert done.returncode != 0


def test_a_training_continues_after_its_relay_is_stopped(tmp_path: Path) -> None:
    env = RELAY | {"PLANT": "stop_relay:-1"}
    limits = ["--hang-timeout", "4", "--timeout", "60"]
    try:
        done = succeeded(train(*SIZES, *limits, cwd=tmp_path, ranks=3, program=PLANTED, env=env))
        assert error_lines(done) == []
    finally:
        with suppress(ProcessLookupError):
            os.kill(int((tmp_path / "relay.pid").read_text()), signal.SIGKILL)


@pytest.mark.parametrize(("fault", "code"), [("raise", 1), ("kill", -9)])
def test_a_failed_rank_behind_the_relay_ends_the_job(
    tmp_path: Path, forks: Forks, fault: str, code: int
) -> None:
    """The ranks are started without mpiexec, which would end the other ranks."""
    env = RELAY | {"PLANT": f"{fault}:2"}
    job = forks.start(*SIZES, cwd=tmp_path, ranks=4, program="tests.training.planted", env=env)
    assert job.wait() == [1, 1, code, 1], job.words()
    if fault == "raise":
        (line,) = [line for line in job.words().splitlines() if line.startswith("[rank ")]
        assert line.startswith("[rank 2/4 ")
