"""A job whose process group never forms ends with one error: the time before the first step is limited."""

import re
from pathlib import Path

import pytest

from tests.conftest import Ended

from .forked import Forks
from .runs import LINEAR

PROGRAM = str(Path(__file__).with_name("never_connected.py"))
SIZES = [*LINEAR, "--num-samples", "64", "--max-steps", "2", "--device", "cpu"]


def failed(forks: Forks, cwd: Path, fault: str, *options: str) -> str:
    """The only error line of a job of three ranks with a fault."""
    env = {"CONNECT_FAULT": fault, "DDP_HPC_RUN_DIR": str(cwd / "run")}
    ended: Ended = forks.script(PROGRAM, *SIZES, *options, cwd=cwd, ranks=3, env=env, timeout_s=40)
    assert ended.exit_code != 0
    [error] = [line for line in ended.stderr.splitlines() if "error: " in line]
    return error


@pytest.mark.check
def test_a_process_group_that_never_forms_ends_the_job(forks: Forks, tmp_path: Path) -> None:
    error = failed(forks, tmp_path, "hang:1", "--init-timeout", "1")
    assert "all 3 ranks have been connecting the process group for " in error
    missing = r"\(rank 1 on \S+ at never_connected\.py:\d+ never_connects; ranks 0, 2 on \S+ at "
    assert re.search(missing, error), error
    assert "NCCL_DEBUG=INFO" in error
    assert "raise --init-timeout" in error
    assert len(list((tmp_path / "run" / "stacks").iterdir())) == 3


@pytest.mark.check
def test_a_rank_that_dies_while_the_ranks_connect_is_named(forks: Forks, tmp_path: Path) -> None:
    error = failed(forks, tmp_path, "kill:1", "--init-timeout", "60")
    assert "rank 1 on " in error
    assert "is gone: the connection closed unexpectedly" in error
    assert "last seen connecting the process group" in error


def test_the_time_between_the_connection_and_the_first_step_is_limited(forks: Forks, tmp_path: Path) -> None:
    error = failed(forks, tmp_path, "data:all", "--timeout", "2", "--hang-timeout", "2")
    assert "all 3 ranks have been preparing the data and the model for " in error
    assert "reads_a_dead_file_system" in error
    assert "raise --hang-timeout" in error
