"""Programs with other libraries stop before the deadline, and are resumed with the same results."""

from __future__ import annotations

from pathlib import Path

import pytest

from .conftest import NEEDS, NUM_STEPS, RunExample, state, steps, weights

LAUNCHERS = ["mpiexec", "openmpi", "torchrun"]


@pytest.mark.parametrize(
    ("name", "launcher"),
    [
        *((name, "mpiexec") for name in NEEDS),
        *(("deadline_loop.py", launcher) for launcher in LAUNCHERS[1:]),
        *(
            pytest.param(name, launcher, marks=pytest.mark.soak)
            for name in NEEDS
            for launcher in LAUNCHERS[1:]
            if name != "deadline_loop.py"
        ),
    ],
)
def test_an_interrupted_run_has_the_same_weights(
    name: str, launcher: str, run_example: RunExample, tmp_path: Path
) -> None:
    pytest.importorskip(NEEDS[name])
    (tmp_path / "whole").mkdir()
    whole = run_example(name, launcher=launcher, checkpoints="whole/checkpoints")
    assert whole.exit_code == 0, whole.stderr
    stopped = run_example(name, launcher=launcher, left_s=5)
    assert stopped.exit_code == (0 if launcher == "torchrun" else 75), stopped.stdout + stopped.stderr
    assert "Stopping at step " in stopped.stderr
    word, step, reason = state(tmp_path)
    assert (word, reason.strip()) == ("requeue", "the job's time limit is near (DDP_HPC_DEADLINE)")
    assert 0 < int(step) < NUM_STEPS
    assert (tmp_path / "progress").read_text() == f"{step}\n"
    resumed = run_example(name, launcher=launcher)
    assert resumed.exit_code == 0, resumed.stderr
    if name != "hf_trainer.py":  # which prints no steps
        assert steps(stopped) + steps(resumed) == list(range(NUM_STEPS))
    assert weights(resumed) == weights(whole)
