"""Errors in the user's code: one line with location and samples, and a file with the traceback."""

import re
import stat
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

from ddp_hpc.base.user_code_exceptions import describe_error, write_traceback

from .runs import error_lines, train
from .tiny import state_of


@pytest.mark.parametrize(
    ("rank", "prefix", "words"),
    [
        ("5", "[rank 5 ", "a rank must be less than the size"),
        ("1", "[rank 1/2 ", "cannot reach rank 0"),  # rank 0 was not started
    ],
)
def test_an_error_before_the_connection_names_the_rank(tmp_path, launch, rank, prefix, words):
    env = {"RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    ended = launch([sys.executable, "-m", "ddp_hpc.train", "--init-timeout", "1"], env=env)
    (line,) = ended.stderr.splitlines()
    assert line.startswith(prefix)
    assert words in line


MINE = """
import os

import torch
from torch import nn

from ddp_hpc.training.tasks.task import Task

RANK = os.environ.get("RANK") or os.environ.get("PMI_RANK")


def fail(what):
    raise ArithmeticError(f"planted in the {what}\\nand a second line")  # the line that is to be named


class Net(nn.Module):
    def __init__(self, bad):
        super().__init__()
        self.linear, self.bad, self.calls = nn.Linear(20, 1), bad, 0

    def forward(self, x):
        self.calls += self.training
        if self.bad == "forward" and self.calls == 3 and RANK == "1":
            fail("forward pass")
        if self.bad == "evaluation" and not self.training:
            fail("evaluation")
        return self.linear(x)


class Numbers:
    def __init__(self, bad):
        self.bad = bad

    def __len__(self):
        return 64

    def __getitem__(self, number):
        if self.bad == "dataset" and number == 20:
            fail("dataset")
        if self.bad == "pair" and number == 20:
            return {"src": 1}
        return torch.full((20,), number / 64), [number / 64]


def net(bad):
    model = Net(bad)

    def loss(output, tgt):
        if bad == "loss" and model.calls == 3 and RANK == "1":
            fail("loss")
        return (output - tgt).square().mean()

    return Task(model=model, loss=loss, dataset=Numbers(bad), test_dataset=Numbers(""))
"""
LINE = next(i for i, line in enumerate(MINE.splitlines(), 1) if "the line that is to be named" in line)
MODEL = ["--model", "mine:net", "--batch-size", "4", "--epochs", "1", "--no-shuffle"]


@pytest.fixture
def mine(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path


def assert_told(text, home, ranks, rank, words, file):
    """Checks the line, and the traceback in the file that it names."""
    assert "Traceback (most recent call last)" not in text
    (line,) = [line for line in text.splitlines() if "error: " in line]
    assert re.match(rf"\[rank {rank}/{ranks} \S+\] error: ", line)
    for word in words:
        assert word in line
    assert f" ({home}/mine.py:{LINE} in fail)" in line
    assert f"; the traceback is in {file}" in line
    path = home / line.rpartition(" is in ")[2]
    content = path.read_text()
    assert content.startswith("Traceback (most recent call last):\n")
    assert f'mine.py", line {LINE}, in fail' in content
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    return path


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (
            "forward",
            ["step 3: ArithmeticError: planted in the forward pass and a", "samples 20, 21, 22, 23;"],
        ),
        (
            "loss",
            ["step 3: ArithmeticError: planted in the loss and a second line", "samples 20, 21, 22, 23;"],
        ),
        ("dataset", ["dataset[20] raised ArithmeticError: planted in the dataset and"]),
    ],
)
def test_one_line_names_rank_step_samples_and_location_and_a_file_contains_the_traceback(
    bad, words, mine, forks
):
    saving = ["--snapshot-dir", "run", "--snapshot-every-steps", "1", "--accumulate", "1"]
    job = forks.start(*MODEL, *saving, "--model-option", f"bad='{bad}'", cwd=mine, ranks=2)
    assert job.wait() == [1, 1]
    assert_told(job.words(), mine, 2, 1, words, "run/tracebacks/rank00001.txt")
    assert [path.name for path in (mine / "run" / "tracebacks").iterdir()] == ["rank00001.txt"]
    state = state_of(mine)
    assert state.state == "failed"
    assert "ArithmeticError: planted in the " in state.reason


@pytest.mark.check
def test_an_error_in_an_evaluation_names_the_evaluation(mine, forks):
    job = forks.start(*MODEL, "--model-option", "bad='evaluation'", cwd=mine, ranks=2)
    assert job.wait() == [1, 1]
    (line,) = job.errors()
    assert "error: the evaluation after step 8: ArithmeticError: planted in the evaluation" in line


def test_an_item_that_is_not_a_pair_is_reported(mine, forks):
    job = forks.start(*MODEL, "--model-option", "bad='pair'", cwd=mine, ranks=2)
    assert job.wait() == [1, 1]
    (line,) = job.errors()
    assert "dataset[20] returned a dict with 1 values; a pair (src, tgt) of arrays is required" in line
    assert "traceback" not in line


@pytest.mark.check
def test_without_a_run_directory_the_traceback_is_in_a_new_directory(mine):
    words = [*MODEL, "--model-option", "bad='forward'"]
    done = train(*words, cwd=mine, ranks=2, env={"TMPDIR": str(mine)})
    assert done.returncode == 1, done.stderr
    (line,) = [line for line in error_lines(done) if line.startswith("[rank ")]
    path = assert_told(line, mine, 2, 1, ["step 3: ", "samples 20, 21, 22, 23;"], f"{mine}/ddp-hpc-")
    assert stat.S_IMODE(path.parents[1].stat().st_mode) == 0o700
    assert "ArithmeticError" not in done.stderr.replace(line, "")


@pytest.mark.check
def test_an_error_of_a_worker_is_reported_by_its_rank(mine):
    with h5py.File(mine / "d.h5", "w") as file:
        file["src"], file["tgt"] = np.zeros((64, 20), np.float32), np.zeros((64, 1), np.float32)
    # Loaded at the start of Python; reading fails only in workers.
    (mine / "sitecustomize.py").write_text(
        "import sys\n"
        "if '--multiprocessing-fork' in sys.orig_argv:\n"
        "    from mine import fail\n"
        "    from ddp_hpc.data.samples import Samples\n"
        "    Samples.read = lambda *_: fail('worker')\n"
    )
    env = {"PYTHONPATH": f"{mine}:{Path(__file__).parents[2]}"}
    words = ["--model", "linear", "--data", "d.h5", "--workers", "1", "--snapshot-dir", "run"]
    done = train(*words, cwd=mine, ranks=2, env=env)
    assert done.returncode == 1, done.stderr
    (line,) = error_lines(done)
    assert re.search(
        r"step 1: a worker process \(--workers\) raised ArithmeticError: planted in the worker", line
    )
    assert "Traceback" not in done.stderr
    (path,) = (mine / "run" / "tracebacks").iterdir()
    assert f'mine.py", line {LINE}, in fail' in path.read_text()


def test_an_error_without_message_or_location_is_reported():
    assert describe_error(ValueError()) == "ValueError"
    assert describe_error(KeyError("lost")) == "KeyError: lost"
    assert describe_error(ValueError("x" * 1000)).endswith("x...")


def test_a_traceback_replaces_the_previous_one_and_follows_no_links(tmp_path):
    (tmp_path / "tracebacks").mkdir()
    (tmp_path / "tracebacks" / "rank00000.txt").symlink_to(tmp_path / "other")
    path = write_traceback("words", tmp_path, 0)
    assert path.read_text() == "words\n"
    assert not (tmp_path / "other").exists()
