"""Programs with the Hugging Face Trainer are interrupted at any step, and resumed with the same results."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Ended, Launch, skip_without

skip_without("transformers", "accelerate")
# make test runs the example of test_examples.py.
pytestmark = pytest.mark.check

FITS = Path(__file__).with_name("trainer_fits.py")
# The step after which each interrupted run stops.
STOPPED = {
    "in the middle of the second epoch": 14,
    "at the last batch of an epoch": 10,
    "during an evaluation": 11,
    "between accumulated gradients [1] ü": 5,
    "after the best checkpoint": 24,
    "at a step with an evaluation": 14,
    "at a step with an evaluation and a checkpoint": 14,
    "at the end of an epoch with an evaluation": 10,
    "at a step with an evaluation that is not the best": 14,
    "at the end of an epoch that is not the best": 21,
}
COMPLETED = {"at the last step of num_train_epochs": 30, "at the last step of max_steps": 24}
Fits = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def ended(mpiexec: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ended]:
    launch = Launch()
    argv = [mpiexec, "-n", "2", sys.executable, "-m", "ddp_hpc.exec", sys.executable, FITS]
    directory = tmp_path_factory.mktemp("fits")
    yield launch([*argv, directory], env={"OMP_NUM_THREADS": "1"}, timeout_s=180)
    launch.stop_all()


@pytest.fixture(scope="module")
def fits(ended: Ended) -> Fits:
    """The uninterrupted, the interrupted and the resumed run of each comparison."""
    lines = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith('{"name"')]
    assert ended.exit_code == 0, ended.stdout + ended.stderr
    return {line["name"]: line["results"] for line in lines}


@pytest.mark.parametrize("name", STOPPED)
def test_a_resumed_run_is_like_an_uninterrupted_one(fits: Fits, name: str) -> None:
    whole, interrupted, resumed = fits[name]
    assert (interrupted["code"], interrupted["step"]) == (75, STOPPED[name])
    assert resumed["resumed"] == f"checkpoint-{STOPPED[name]}"
    assert (resumed["code"], resumed["step"], resumed["weights"]) == (None, whole["step"], whole["weights"])
    # No evaluation is omitted or repeated.
    assert interrupted["evaluated"] + resumed["evaluated"] == whole["evaluated"]


@pytest.mark.parametrize("name", COMPLETED)
def test_a_run_that_is_signaled_during_its_last_step_is_complete(fits: Fits, name: str) -> None:
    _, signaled, following = fits[name]
    assert (signaled["code"], signaled["step"], following["resumed"]) == (None, COMPLETED[name], None)


def test_a_signal_ends_the_program_again_after_the_training(fits: Fits) -> None:
    assert fits["in the middle of the second epoch"][0]["is_signal_default"]


def test_checkpoints_without_an_optimizer_are_refused(ended: Ended) -> None:
    assert (
        ended.stdout.count("refused: TrainingArguments(save_only_model=True): such checkpoints cannot") == 2
    )


def test_ranks_that_would_train_separately_are_refused(ended: Ended) -> None:
    import torch

    if torch.accelerator.is_available():
        pytest.skip("the Trainer uses the accelerator")
    assert ended.stdout.count("refused: 2 ranks were started, but the Trainer trains separately on each") == 2


def test_incomplete_checkpoints_are_skipped(tmp_path: Path) -> None:
    from ddp_hpc.integrations.transformers import newest_checkpoint

    assert newest_checkpoint(tmp_path / "missing") is None
    states = {"checkpoint-5": "{}", "checkpoint-6": None, "checkpoint-7": '{"step": ', "checkpoint-new": "{}"}
    for name, state in states.items():
        (tmp_path / name).mkdir()
        if state is not None:
            (tmp_path / name / "trainer_state.json").write_text(state)
    (tmp_path / "checkpoint-8").touch()
    assert newest_checkpoint(tmp_path) == str(tmp_path / "checkpoint-5")
