"""Programs with other libraries stop before the deadline, and are resumed with the same results."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import skip_without

from .conftest import NEEDS, NUM_STEPS, RunExample, state, steps, weights

LAUNCHERS = ["mpiexec", "openmpi", "torchrun"]
# `make test` runs only these examples, because the others call the same functions of ddp-hpc in a different
# loop. `make soak` runs all examples with all launchers. A launcher changes the environment and the exit
# code; test_lightning.py, test_transformers.py and tests/library/test_deadline.py use real launchers.
USUALLY = ("deadline_loop.py", "lightning_trainer.py", "hf_trainer.py")
_WEIGHTS: dict[str, str] = {}


@pytest.fixture
def uninterrupted(run_example: RunExample, tmp_path: Path) -> Callable[[str], str]:
    """Returns a function that returns the weights of an example after an uninterrupted run of two ranks."""

    def run(name: str) -> str:
        if name not in _WEIGHTS:  # the launcher makes no difference
            (tmp_path / "whole").mkdir()
            whole = run_example(name, checkpoints="whole/checkpoints")
            assert whole.exit_code == 0, whole.stderr
            _WEIGHTS[name] = weights(whole)
        return _WEIGHTS[name]

    return run


@pytest.mark.parametrize(
    ("name", "launcher"),
    [
        *((name, "forks") for name in USUALLY),
        *(pytest.param(name, launcher, marks=pytest.mark.soak) for name in NEEDS for launcher in LAUNCHERS),
    ],
)
def test_an_interrupted_run_has_the_same_weights(
    name: str,
    launcher: str,
    run_example: RunExample,
    uninterrupted: Callable[[str], str],
    tmp_path: Path,
) -> None:
    skip_without(NEEDS[name])
    # In the second epoch, since the examples have epochs of ten steps. Only rank 1 receives the signal.
    stopped = run_example(name, launcher=launcher, signal_at=13)
    assert stopped.exit_code == (0 if launcher == "torchrun" else 75), stopped.stdout + stopped.stderr
    word, step, reason = state(tmp_path)
    assert (word, reason.strip()) == ("requeue", "rank 1 received SIGTERM")
    assert step == "13"
    if name != "library_loop.py":  # whose snapshots the supervisor finds
        assert f"Stopping at step {step}: rank 1 received SIGTERM. Checkpoint saved" in stopped.stderr
        assert (tmp_path / "progress").read_text() == f"{step}\n"
    resumed = run_example(name, launcher=launcher)
    assert resumed.exit_code == 0, resumed.stderr
    if name != "hf_trainer.py":  # which prints no steps
        assert steps(stopped) + steps(resumed) == list(range(NUM_STEPS))
    assert weights(resumed) == uninterrupted(name)


@pytest.mark.check
def test_a_run_that_is_stopped_at_the_end_of_an_epoch_has_the_same_weights(
    run_example: RunExample, uninterrupted: Callable[[str], str], tmp_path: Path
) -> None:
    skip_without("lightning")
    stopped = run_example("lightning_trainer.py", signal_at=10)
    # After the last step of an epoch, Lightning would omit the next epoch of a run with max_steps.
    assert (stopped.exit_code, state(tmp_path)[1]) == (75, "11"), stopped.stderr
    assert weights(run_example("lightning_trainer.py")) == uninterrupted("lightning_trainer.py")


@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param("forks", marks=pytest.mark.check),
        *(pytest.param(name, marks=pytest.mark.soak) for name in LAUNCHERS),
    ],
)
def test_a_program_that_does_not_use_ddp_hpc_is_resumed_with_the_same_weights(
    launcher: str, run_example: RunExample, tmp_path: Path
) -> None:
    (tmp_path / "whole").mkdir()
    whole = run_example("plain_ddp.py", launcher=launcher, checkpoints="whole/checkpoint.pt")
    assert whole.exit_code == 0, whole.stderr
    stopped = run_example("plain_ddp.py", launcher=launcher, checkpoints="checkpoint.pt", signal_at=13)
    assert stopped.exit_code == 1, stopped.stdout + stopped.stderr
    resumed = run_example("plain_ddp.py", launcher=launcher, checkpoints="checkpoint.pt")
    assert resumed.exit_code == 0, resumed.stderr
    assert steps(stopped) + steps(resumed) == list(range(NUM_STEPS))
    assert weights(resumed) == weights(whole)
