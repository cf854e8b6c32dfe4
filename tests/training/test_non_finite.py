"""A loss or a parameter that is no finite number ends the run, and what was saved before it stays."""

import math

import pytest
import safetensors.torch

from .runs import error_lines, records, train
from .tiny import state_of

# On rank 1 alone, from the forward pass `bad_at` on: a NaN in the output, a gradient of NaN or of infinity
# beside a loss that is a number.
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
        tensors = safetensors.torch.load_file(folder / "model.safetensors")
        found[int(folder.name[5:])] = all(
            tensor.isfinite().all().item() for name, tensor in tensors.items() if name != "mask"
        )
    return found


def test_a_loss_of_one_rank_ends_all_and_a_rerun_goes_on_from_before_it(mine, forks):
    job = forks.start(*MODEL, *SAVING, *options(bad_at=3), "--log-every", "1", cwd=mine, ranks=2)
    assert job.wait() == [1, 1]
    (line,) = job.errors()
    assert "step 3: the loss of rank 1 is nan: look at the data" in line
    assert line.endswith(". The snapshot of step 2 is kept")
    assert snapshots(mine) == {2: True}
    state = state_of(mine)
    assert (state.state, state.step) == ("failed", 2)
    assert "the loss of rank 1 is nan" in state.reason

    words = forks.run(*MODEL, *SAVING, *options(bad_at=100), cwd=mine, ranks=2).words()
    assert "going on after step 2 " in words
    assert snapshots(mine) == {6: True, 8: True}
    assert state_of(mine).state == "done"


def test_steps_whose_losses_nobody_has_looked_at_are_looked_at_before_a_snapshot(mine, forks):
    # Ranks tell each other their losses once a second or so: steps 3 and 4 are not told before the save.
    words = [*MODEL, *SAVING, "--snapshot-every-steps", "4", "--log-every", "100"]
    job = forks.start(*words, *options(bad_at=3), cwd=mine, ranks=2)
    assert job.wait() == [1, 1]
    (line,) = job.errors()
    assert "step 3: the loss of rank 1 is nan" in line
    assert line.endswith(". There is no earlier snapshot")
    assert snapshots(mine) == {}


@pytest.mark.parametrize("saving", [SAVING, []])
def test_a_parameter_ends_the_run_before_it_is_saved_though_all_losses_are_numbers(saving, mine, forks):
    # In the last step: no later loss tells of it.
    words = [*MODEL, *saving, "--metrics", "m.jsonl", *options(kind="'gradient'", bad_at=8)]
    job = forks.start(*words, cwd=mine, ranks=2)
    assert job.wait() == [1, 1]
    (line,) = job.errors()
    assert "step 8: the parameter first.weight is not finite on rank 0" in line
    assert all(math.isfinite(record["loss"]) for record in records(mine / "m.jsonl"))
    assert snapshots(mine) == ({4: True, 6: True} if saving else {})


@pytest.mark.parametrize("strategy", ["fsdp", pytest.param("zero", marks=pytest.mark.soak)])
def test_a_parameter_that_is_spread_over_ranks_is_looked_at_by_the_rank_that_has_it(strategy, mine, forks):
    words = [*MODEL, *SAVING, "--strategy", strategy, *options(kind="'gradient'", bad_at=4)]
    job = forks.start(*words, cwd=mine, ranks=2)
    assert job.wait() == [1, 1]
    (line,) = job.errors()
    assert "step 4: the parameter first.weight is not finite on rank " in line
    assert snapshots(mine) == {2: True}


def test_a_gradient_that_overflows_under_fp16_leaves_one_update_out_and_no_more(mine, forks):
    words = [*MODEL, *SAVING, "--amp", "fp16", *options(kind="'overflow'", bad_at=3, until=4)]
    forks.run(*words, cwd=mine, ranks=2)
    assert snapshots(mine) == {6: True, 8: True}
    weights = [
        safetensors.torch.load_file(mine / "run" / f"step_{step:08d}" / "model.safetensors")["first.weight"]
        for step in (6, 8)
    ]
    assert not weights[0].equal(weights[1])


@pytest.mark.parametrize("kind", ["loss", "gradient"])
def test_who_allows_it_trains_on_as_long_as_the_parameters_are_finite(kind, mine, forks):
    # The scaler leaves out the update of a loss that is no number.
    words = [*MODEL, *SAVING, "--amp", "fp16", "--log-every", "1", "--allow-non-finite-loss"]
    job = forks.run(*words, *options(kind=f"'{kind}'", bad_at=3, until=4), cwd=mine, ranks=2)
    assert snapshots(mine) == {6: True, 8: True}
    assert ("warning: step 3: the loss of rank 1 is nan" in job.words()) == (kind == "loss")


@pytest.mark.parametrize("launcher", ["mpiexec", pytest.param("torchrun", marks=pytest.mark.soak)])
def test_real_launchers_end_with_one_error_and_leave_the_good_snapshot(launcher, mine):
    done = train(*MODEL, *SAVING, *options(bad_at=3), cwd=mine, ranks=2, launcher=launcher)
    assert done.returncode == 1, done.stderr
    (line,) = [line for line in error_lines(done) if line.startswith("[rank ")]
    assert "the loss of rank 1 is nan" in line
    assert snapshots(mine) == {2: True}
    assert state_of(mine).state == "failed"
