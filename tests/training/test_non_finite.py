"""A non-finite loss or parameter ends the run, and earlier snapshots are kept."""

import math

import pytest
import safetensors.torch

from ddp_hpc.training.snapshots.snapshot_files import read_snapshot

from .runs import records
from .tiny import state_of

# Only on rank 1, from the forward pass `bad_at` on: a NaN in the output, or a non-finite gradient with a
# finite loss.
MINE = """
import os

import torch
from torch import nn

from ddp_hpc.training.tasks.task import Task


RANK = os.environ.get("RANK") or os.environ.get("PMI_RANK")


class Net(nn.Module):
    def __init__(self, kind, bad_at, until):
        super().__init__()
        self.first, self.second = nn.Linear(20, 8), nn.Linear(8, 1)
        self.kind, self.bad, self.calls = kind, range(bad_at, until), 0

    def forward(self, x):
        self.calls += 1
        output = self.second(self.first(x).relu())
        if not self.training or self.calls not in self.bad or RANK != "1":
            return output
        if self.kind == "loss":
            return output * float("nan")
        if self.kind == "gradient":
            return output + (output * 0).abs().sqrt()  # 0 / 0
        return output + torch.expm1(output * 1e-30) * 1e38  # the derivative is too large for half floats


def net(kind="loss", bad_at=3, until=10**9):
    numbers = torch.rand(64, 20, generator=torch.Generator().manual_seed(1))
    model = Net(kind, bad_at, until)
    model.register_buffer("mask", torch.tensor([float("-inf")]))  # no reason to stop
    return Task(model=model, dataset=(numbers, numbers.sum(dim=1, keepdim=True)))
"""
MODEL = ["--model", "mine:net", "--batch-size", "4", "--epochs", "1"]  # 8 steps of 2 ranks
SAVING = ["--snapshot-dir", "run", "--snapshot-every-steps", "2", "--keep", "2"]


@pytest.fixture
def mine(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path


def options(**of_the_model):
    return [word for name, value in of_the_model.items() for word in ("--model-option", f"{name}={value}")]


def snapshots(home):
    """The steps, and whether all trained values of each are finite."""
    found = {}
    for folder in sorted((home / "run").glob("step_*")):
        tensors = read_snapshot(folder).model
        found[int(folder.name[5:])] = all(
            tensor.isfinite().all().item() for name, tensor in tensors.items() if name != "mask"
        )
    return found


def test_a_non_finite_loss_ends_all_ranks_and_a_rerun_resumes_before_it(mine, forks):
    job = forks.start(*MODEL, *SAVING, *options(bad_at=3), "--log-every", "1", cwd=mine, ranks=2)
    assert job.wait() == [1, 1]
    (line,) = job.errors()
    assert "step 3: the loss of rank 1 is nan: check the data" in line
    assert line.endswith(". The snapshot of step 2 is kept")
    assert snapshots(mine) == {2: True}
    state = state_of(mine)
    assert (state.state, state.step) == ("failed", 2)
    assert "the loss of rank 1 is nan" in state.reason

    words = forks.run(*MODEL, *SAVING, *options(bad_at=100), cwd=mine, ranks=2).words()
    assert "resuming after step 2 " in words
    assert snapshots(mine) == {6: True, 8: True}
    assert state_of(mine).state == "done"


@pytest.mark.parametrize("program", ["ddp_hpc.train", "tests.training.delayed"])
def test_pending_losses_are_checked_before_a_snapshot(mine, forks, program):
    # Ranks exchange losses about once per second: steps 3 and 4 are not exchanged before the save.
    words = [*MODEL, *SAVING, "--snapshot-every-steps", "4", "--log-every", "100"]
    job = forks.start(*words, *options(bad_at=3), cwd=mine, ranks=2, program=program)
    assert job.wait() == [1, 1]
    (line,) = job.errors()
    assert "step 3: the loss of rank 1 is nan" in line
    assert line.endswith(". There is no earlier snapshot")
    assert snapshots(mine) == {}


@pytest.mark.parametrize("saving", [SAVING, []])
def test_a_non_finite_parameter_is_never_saved(saving, mine, forks):
    # In the last step, so that no later loss is affected.
    words = [*MODEL, *saving, "--metrics", "m.jsonl", *options(kind="'gradient'", bad_at=8)]
    job = forks.start(*words, cwd=mine, ranks=2)
    assert job.wait() == [1, 1]
    (line,) = job.errors()
    assert "step 8: the parameter first.weight is not finite on rank 0" in line
    assert all(math.isfinite(record["loss"]) for record in records(mine / "m.jsonl"))
    assert snapshots(mine) == ({4: True, 6: True} if saving else {})


@pytest.mark.parametrize("strategy", ["fsdp", pytest.param("zero", marks=pytest.mark.soak)])
def test_a_sharded_parameter_is_checked_on_the_rank_that_holds_it(strategy, mine, forks):
    words = [*MODEL, *SAVING, "--strategy", strategy, *options(kind="'gradient'", bad_at=4)]
    job = forks.start(*words, cwd=mine, ranks=2)
    assert job.wait() == [1, 1]
    (line,) = job.errors()
    assert "step 4: the parameter first.weight is not finite on rank " in line
    assert snapshots(mine) == {2: True}


def test_an_overflow_with_fp16_skips_only_one_update(mine, forks):
    words = [*MODEL, *SAVING, "--amp", "fp16", *options(kind="'overflow'", bad_at=3, until=4)]
    forks.run(*words, cwd=mine, ranks=2)
    assert snapshots(mine) == {6: True, 8: True}
    weights = [
        safetensors.torch.load_file(mine / "run" / f"step_{step:08d}" / "model-00000.safetensors")[
            "first.weight"
        ]
        for step in (6, 8)
    ]
    assert not weights[0].equal(weights[1])


@pytest.mark.parametrize("kind", ["loss", "gradient"])
def test_with_allow_non_finite_loss_training_continues_while_parameters_are_finite(kind, mine, forks):
    # The scaler skips the update of a non-finite loss.
    words = [*MODEL, *SAVING, "--amp", "fp16", "--log-every", "1", "--allow-non-finite-loss"]
    job = forks.run(*words, *options(kind=f"'{kind}'", bad_at=3, until=4), cwd=mine, ranks=2)
    assert snapshots(mine) == {6: True, 8: True}
    assert ("warning: step 3: the loss of rank 1 is nan" in job.words()) == (kind == "loss")
