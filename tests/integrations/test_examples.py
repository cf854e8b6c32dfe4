"""Programs with other libraries stop before the deadline, and are resumed with the same results."""

from __future__ import annotations

from pathlib import Path

import pytest

from .conftest import NEEDS, NUM_STEPS, RunExample, state, steps, weights


@pytest.mark.parametrize("name", NEEDS)
def test_an_interrupted_run_has_the_same_weights(name: str, run_example: RunExample, tmp_path: Path) -> None:
    pytest.importorskip(NEEDS[name])
    (tmp_path / "whole").mkdir()
    whole = run_example(name, checkpoints="whole/checkpoints")
    assert whole.exit_code == 0, whole.stderr
    trained: list[int] = []
    reached = [0]
    for _ in range(2):
        ended = run_example(name, left_s=5)
        assert ended.exit_code == 75, ended.stdout + ended.stderr
        assert "Stopping at step " in ended.stderr
        word, step, reason = state(tmp_path)
        assert (word, reason.strip()) == ("requeue", "the job's time limit is near (DDP_HPC_DEADLINE)")
        assert reached[-1] < int(step) < NUM_STEPS
        assert (tmp_path / "progress").read_text() == f"{step}\n"
        reached.append(int(step))
        trained += steps(ended)
    last = run_example(name)
    assert last.exit_code == 0, last.stderr
    if name != "hf_trainer.py":  # which prints no steps
        assert trained + steps(last) == list(range(NUM_STEPS))
    assert weights(last) == weights(whole)
