"""A loop with several models and micro-batches is interrupted on real ranks, and resumes exactly."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import pytest

from ddp_hpc.base.run_state import read_state
from tests.conftest import Ended, Launch
from tests.training.forked import Forks

PROGRAM = Path(__file__).with_name("whole_loop.py")
Run = Callable[..., Ended]


@pytest.fixture
def run(forks: Forks, tmp_path: Path) -> Run:
    def run(folder: str, ranks: int = 2, **env: str) -> Ended:
        return forks.script(PROGRAM, folder, cwd=tmp_path, ranks=ranks, env=env)

    return run


def _losses(ended: Ended) -> list[str]:
    return re.findall(r"^loss .*$", ended.stdout, re.MULTILINE)


def _weights(ended: Ended) -> str:
    [found] = re.findall(r"^weights (\w+)$", ended.stdout, re.MULTILINE)
    return str(found)


def _numbers(lines: list[str]) -> list[list[int]]:
    """Returns the samples of each step."""
    return [sorted(ast.literal_eval(line[line.index("[") :])) for line in lines]


def test_a_loop_resumes_bit_for_bit_in_the_middle_of_an_epoch(run: Run, tmp_path: Path) -> None:
    whole = run("whole")
    assert whole.exit_code == 0, whole.stderr
    assert len(_losses(whole)) == 15, whole.stderr
    first = run("parts", INTERRUPT_AT="8")
    assert first.exit_code == 75, first.stderr
    state = read_state(tmp_path / "parts")
    assert state is not None
    assert (state.state, state.step) == ("requeue", 8)
    second = run("parts", INTERRUPT_AT="10")  # the last step of the second epoch, which is smaller
    assert second.exit_code == 75, second.stderr
    third = run("parts")
    assert third.exit_code == 0, third.stderr
    assert "resuming after step 10 (epoch 3, 0 of its samples used)" in third.stderr
    assert _losses(first) + _losses(second) + _losses(third) == _losses(whole)
    assert _weights(third) == _weights(whole)


def test_with_another_number_of_ranks_each_step_has_the_same_samples(run: Run) -> None:
    whole = run("whole")
    first = run("parts", INTERRUPT_AT="8")
    rest = run("parts", ranks=1, BATCH_SIZE="10")
    assert (first.exit_code, rest.exit_code) == (75, 0), rest.stderr
    assert "the number of ranks changed from 2 to 1" in rest.stderr
    numbers = _numbers(_losses(whole))
    assert _numbers(_losses(first) + _losses(rest)) == numbers
    for epoch in range(3):
        assert sorted(chain(*numbers[5 * epoch : 5 * epoch + 5])) == list(range(42))


def test_a_program_that_requests_another_job_ends_with_75_and_without_an_error(
    launch: Launch, mpiexec: Path, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(
        "import os, signal, ddp_hpc\n"
        "with ddp_hpc.distributed() as world:\n"
        "    deadline = ddp_hpc.deadline()\n"
        "    if world.rank == 1:\n"
        "        os.kill(os.getpid(), signal.SIGUSR1)\n"
        "    assert deadline.should_stop()\n"
        "    deadline.requeue(7)\n"
    )
    env = {"DDP_HPC_RUN_DIR": str(tmp_path)}
    ended = launch([mpiexec, "-n", "2", sys.executable, "own.py"], cwd=tmp_path, env=env, timeout_s=60)
    assert ended.exit_code == 75, ended.stderr
    assert "error" not in ended.stderr
    assert "Stopping at step 7: rank 1 received SIGUSR1. Checkpoint saved" in ended.stderr
    state = read_state(tmp_path)
    assert state is not None
    assert (state.state, state.step) == ("requeue", 7)


@pytest.mark.check
@pytest.mark.parametrize("rank", [0, 1])
def test_a_program_that_exits_with_75_on_one_rank_is_not_an_error(
    rank: int, launch: Launch, mpiexec: Path, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(
        "import sys, ddp_hpc\n"
        "with ddp_hpc.distributed() as world:\n"
        f"    if world.rank == {rank}:\n"
        "        sys.exit(75)\n"
    )
    ended = launch([mpiexec, "-n", "2", sys.executable, "own.py"], cwd=tmp_path, timeout_s=60)
    assert ended.exit_code == 75, ended.stderr
    assert "error" not in ended.stderr
