"""Lightning programs are interrupted at any step, and resumed with the same results."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Ended, Launch, skip_without

skip_without("lightning", "torchdata")
# make test runs the example of test_examples.py.
pytestmark = pytest.mark.check

FITS = Path(__file__).with_name("lightning_fits.py")
# The step after which each interrupted run stops.
STOPPED = {
    "in the middle of the second epoch": 14,
    "at the last batch of an epoch": 10,
    "during a validation": 10,
    "during the first validation": 1,
    "between accumulated gradients [1] ü": 5,
    "in an epoch of one batch": 2,
    "before a validation within an epoch": 14,
    "at the last batch of an epoch, with max_steps": 11,
    "before a validation by steps": 13,
}
COMPLETED = {"at the last step of max_epochs": 30, "at the last step of max_steps": 24}
Fits = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def ended(mpiexec: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ended]:
    launch = Launch()
    argv = [
        mpiexec,
        "-n",
        "2",
        sys.executable,
        "-m",
        "ddp_hpc.exec",
        sys.executable,
        FITS,
        tmp_path_factory.mktemp("fits"),
    ]
    yield launch(argv, env={"OMP_NUM_THREADS": "1"}, timeout_s=180)
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
    assert interrupted["files"] == [f"deadline-step={STOPPED[name]}.ckpt"]
    assert (resumed["code"], resumed["step"]) == (None, whole["step"])
    for key in ("weights", "average", "later"):
        assert resumed[key] == whole[key], key
    assert whole["validated"]
    # No hook of the module is omitted or called twice.
    for key in ("validated", "ended", "batches"):
        assert interrupted[key] + resumed[key] == whole[key], key


@pytest.mark.parametrize("name", COMPLETED)
def test_a_run_that_is_signaled_during_its_last_step_is_complete(fits: Fits, name: str) -> None:
    whole, signaled, _ = fits[name]
    assert (signaled["code"], signaled["step"], signaled["files"]) == (None, COMPLETED[name], [])
    assert signaled["ended"] == whole["ended"]


def test_what_cannot_be_resumed_is_refused_or_a_warning(ended: Ended) -> None:
    assert "an epoch of one step cannot be resumed exactly with Trainer(max_steps=4)" in ended.stderr
    assert ended.stdout.count("refused: 2 ranks were started, but the Trainer trains separately") == 2


def test_incomplete_checkpoints_are_skipped(tmp_path: Path) -> None:
    import torch

    from ddp_hpc.integrations.lightning import StopBeforeDeadline

    buffer = io.BytesIO()
    torch.save({"weights": torch.zeros(1000)}, buffer)
    content = buffer.getvalue()
    stop = StopBeforeDeadline(tmp_path)
    assert stop.newest_checkpoint() is None
    assert StopBeforeDeadline(tmp_path / "missing").newest_checkpoint() is None
    (tmp_path / "complete [1] ü.ckpt").write_bytes(content)
    (tmp_path / "half.ckpt").write_bytes(content[: len(content) // 2])
    (tmp_path / "empty.ckpt").touch()
    (tmp_path / "zeros.ckpt").write_bytes(content[:1500] + bytes(len(content) - 1500))
    (tmp_path / "directory.ckpt").mkdir()
    (tmp_path / "link.ckpt").symlink_to("nowhere")
    (tmp_path / "other.tmp").write_bytes(content)
    assert stop.newest_checkpoint() == str(tmp_path / "complete [1] ü.ckpt")
