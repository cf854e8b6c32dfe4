"""The user's own model: `--model mine:factory`, imported from the current directory."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from ddp_hpc.base.errors import DataError, DdpHpcError, RequestError
from ddp_hpc.data.in_memory import samples_of_dataset
from ddp_hpc.training.tasks.builtin_models import factory_of
from ddp_hpc.training.tasks.config import read_model_option
from ddp_hpc.training.tasks.task import Task, as_task, make_task

from .runs import losses

MINE = """
import os

import torch
from torch import nn

from ddp_hpc.training.tasks.task import Task


class Net(nn.Module):
    def __init__(self, width=8, unused=False, bad_at=0):
        super().__init__()
        self.first, self.second = nn.Linear(20, width), nn.Linear(width, 1)
        if unused:
            self.extra = nn.Linear(3, 3)
        self.calls, self.bad_at = 0, bad_at

    def forward(self, x):
        self.calls += 1
        hidden = self.first(x)
        if self.bad_at and self.calls >= self.bad_at and os.environ.get("RANK", "0") == "1":
            hidden = hidden * float("nan")
        return self.second(hidden.relu())


def square(output, tgt):
    return (output - tgt).square().mean()


class Brings:  # an object with a task's attributes is a task
    def __init__(self):
        numbers = torch.rand(50, 20, generator=torch.Generator().manual_seed(1))
        self.model, self.loss = Net(), square
        self.dataset = numbers, numbers.sum(dim=1, keepdim=True)
        self.metrics = {"far": lambda output, tgt: ((output - tgt).abs() > 0.1).sum()}


class Numbers:
    def __len__(self):
        return 40

    def __getitem__(self, number):
        if number == int(os.environ.get("BAD_SAMPLE", "-1")):
            raise KeyError("lost")
        return torch.full((20,), number / 40), [float(number)]


def numbers():
    return Task(model=Net(), loss=square, dataset=Numbers())


def tested():
    return Task(model=Net(), dataset=Brings().dataset, test_dataset=Numbers(), metrics=Brings().metrics)


def flat():
    return nn.Sequential(nn.Linear(20, 1), nn.Flatten(0))


def normed():
    src = torch.rand(40, 20, generator=torch.Generator().manual_seed(1))
    src[int(os.environ["BAD_SAMPLE"])] = float("nan")
    model = nn.Sequential(nn.Linear(20, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    return Task(model=model, loss=square, dataset=(src, torch.zeros(40, 1)))


def by_rank():
    net = Net()
    for parameter in net.parameters():
        nn.init.constant_(parameter, 0.1 + 0.1 * int(os.environ.get("RANK", "0")))
    return net


def running():
    return nn.Sequential(nn.Linear(20, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))


def raises():
    raise ValueError("bad width")


def nothing():
    pass


def no_parameters():
    return nn.ReLU()


def differs():
    return Net(8 + int(os.environ.get("RANK", "0")))


def needs(layers):
    return Net(layers)


def looks(spec):
    return nn.Linear(*spec.src_shape, *spec.tgt_shape)


number = 3
"""
SYNTHETIC = ["--src-shape", "20", "--tgt-shape", "1", "--num-samples", "50"]
SYNTHETIC += ["--batch-size", "8", "--epochs", "2"]


@pytest.fixture
def mine(tmp_path):
    """A directory with the user's module."""
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "broken.py").write_text("import numpy\nimport surely_not_there\n")
    (tmp_path / "cut.py").write_text("def factory(:\n")
    return tmp_path


@pytest.mark.parametrize("factory", ["Net", "Brings", "numbers", "looks"])
def test_a_model_a_task_or_a_similar_object_can_be_trained(factory, mine, forks):
    data = [] if factory in ("Brings", "numbers") else SYNTHETIC[:6]
    words = ["--model", f"mine:{factory}", *data, *SYNTHETIC[6:], "--lr", "0.01", "--metrics", "m.jsonl"]
    forks.run(*words, cwd=mine, ranks=2)
    found = losses(mine / "m.jsonl")
    assert found[-1] < found[0]


def test_the_factory_receives_options_as_numbers_and_text(mine, forks):
    job = forks.run("--model", "mine:Net", "--model-option", "width=3", *SYNTHETIC, cwd=mine, ranks=1)
    assert "model: mine:Net, 67 parameters" in job.words()
    assert read_model_option("--model-option", "a=[1, 2]") == ("a", [1, 2])
    assert read_model_option("--model-option", "a=relu") == ("a", "relu")
    assert read_model_option("--model-option", "a=b=c") == ("a", "b=c")
    for text in ("a", "=1", "a b=1", ""):
        with pytest.raises(RequestError, match="NAME=VALUE"):
            read_model_option("--model-option", text)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("mine:raises", "the factory raised ValueError: bad width ("),
        ("mine:nothing", "the factory returned None; it must return"),
        ("mine:no_parameters", "no parameters to train"),
        ("mine:needs", "requires --model-option layers=VALUE"),
        ("mine:nett", "module 'mine' has no attribute 'nett'"),
        ("mine:number", "is not a function or class"),
        ("surely_not:net", "no module named 'surely_not' in /"),
        ("broken:net", "cannot be imported: ModuleNotFoundError: No module named 'surely_not_there'"),
        ("cut:net", "cannot be imported: SyntaxError"),
        ("mine:", "expected package.module:name"),
        ("../mine:net", "expected package.module:name"),
    ],
)
def test_a_factory_without_a_model_is_rejected(model, words, mine, monkeypatch):
    monkeypatch.syspath_prepend(mine)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    with pytest.raises(RequestError) as caught:
        make_task(model, factory_of(model), None, 0.1, {}, 0)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("model", "options", "code", "words"),
    [
        ("Net", ["--model-option", "widht=3", *SYNTHETIC], 2, "it has width, unused, bad_at"),
        ("differs", SYNTHETIC, 2, "first.weight (9, 20) float32 on rank 1, but first.weight (8, 20) float32"),
        ("Net", [], 2, "Use --data FILE"),
        ("numbers", ["--batch-size", "8"], 1, "dataset[12] raised KeyError: lost ("),
        ("flat", SYNTHETIC, 1, "output is (8,) for targets (8, 1), but the default loss requires (8, 1)."),
    ],
)
def test_an_error_in_the_users_code_is_one_line(model, options, code, words, mine, forks):
    env = {"BAD_SAMPLE": "12"}
    job = forks.start("--model", f"mine:{model}", *options, cwd=mine, ranks=2, env=env)
    assert job.wait() == [code, code]
    (line,) = job.errors()
    assert words in line


def test_unused_parameters_are_reported(mine, forks):
    words = ["--model", "mine:Net", "--model-option", "unused=True", *SYNTHETIC]
    job = forks.start(*words, cwd=mine, ranks=2)
    assert job.wait() == [1, 1]
    (line,) = job.errors()
    assert "2 of the model's parameters received no gradient: extra.weight, extra.bias" in line
    forks.run(*words, "--find-unused-parameters", cwd=mine, ranks=2)


def test_the_first_non_finite_layer_and_its_rank_are_reported_before_the_update(mine, forks):
    words = ["--model", "mine:Net", "--model-option", "bad_at=3", *SYNTHETIC, "--check-gradients"]
    job = forks.start(*words, cwd=mine, ranks=2)
    assert job.wait() == [1, 1]
    (line,) = job.errors()
    assert "step 3: non-finite gradients on rank 1: NaN first in the input of second (Linear)" in line


@pytest.mark.check
def test_non_finite_data_is_reported_if_ranks_share_buffers(mine, forks):
    # DDP broadcasts buffers in the forward pass, which a rank that has found the cause does not run.
    words = ["--model", "mine:normed", "--batch-size", "8", "--no-shuffle", "--check-gradients"]
    job = forks.start(*words, cwd=mine, ranks=2, env={"BAD_SAMPLE": "3"})
    assert job.wait() == [1, 1]
    (line,) = job.errors()
    assert "step 1: non-finite gradients on rank 0: NaN in the data (src)" in line


@pytest.mark.parametrize(
    ("sharing", "ranks"), [("fsdp=2", 2), pytest.param("dp=2,fsdp=2", 4, marks=pytest.mark.check)]
)
def test_initial_values_are_those_of_rank_0(sharing, ranks, mine, forks):
    words = ["--model", "mine:by_rank", *SYNTHETIC, "--lr-scaling", "none"]
    forks.run(*words, "--batch-size", 2 * ranks, "--metrics", "one.jsonl", cwd=mine, ranks=1)
    words = [*words, "--batch-size", "2", "--mesh", sharing, "--metrics", "many.jsonl"]
    forks.run(*words, cwd=mine, ranks=ranks)
    assert losses(mine / "many.jsonl") == pytest.approx(losses(mine / "one.jsonl"), rel=1e-4)


def test_a_task_can_provide_test_data(mine, forks):
    job = forks.run("--model", "mine:tested", "--epochs", "1", "--batch-size", "8", cwd=mine, ranks=2)
    assert "data: provided by the task (50 samples, 40 for tests; memory)" in job.words()
    assert "epoch 1/1 test: loss " in job.words()
    assert " far " in job.words()


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda output, tgt: (output - tgt).square(), "not shape (8, 1)"),
        (lambda output, tgt: (output - tgt).square().mean().item(), "not an object of type float"),
    ],
)
def test_an_invalid_loss_is_rejected(loss, words):
    task = as_task("mine:net", Task(model=nn.Linear(20, 1), loss=loss))
    with pytest.raises(DdpHpcError, match=re.escape(f"a scalar tensor (the batch mean), {words}")):
        task.loss(torch.zeros(8, 1), torch.zeros(8, 1))


@pytest.mark.check
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "pp"])
def test_running_means_in_an_evaluation_are_those_that_are_saved(strategy, mine, forks):
    import h5py
    import numpy as np

    numbers = np.random.default_rng(0).random((50, 20), dtype=np.float32)
    with h5py.File(mine / "d.h5", "w") as file:
        for name, part in (("src", numbers), ("test/src", numbers[:9])):
            file[name] = part * 9
            file[name.replace("src", "tgt")] = part.sum(axis=1, keepdims=True)
    words = ["--model", "mine:running", "--data", "d.h5", "--epochs", "1", "--snapshot-dir", "run"]
    here = forks.run(*words, "--batch-size", "5", "--strategy", strategy, cwd=mine, ranks=2).words()
    there = forks.run(*words, "--batch-size", "10", cwd=mine, ranks=1).words()
    assert "already" in there
    told = [float(line.split()[-1]) for line in (here + there).splitlines() if "test: loss" in line]
    assert told == [pytest.approx(told[0], rel=1e-5)] * 2


def test_the_models_of_the_page_can_be_trained(tmp_path, forks):
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "own-model.md").read_text()
    blocks = re.findall(
        r"```python\n(.*?)```\n\n```\n\$ mpiexec -n 2 python -m ddp_hpc.train (.*?)\n```", page, re.S
    )
    assert len(blocks) == 2
    for number, (code, words) in enumerate(blocks):
        (home := tmp_path / str(number)).mkdir()
        (home / "mine.py").write_text(code)
        forks.run(*words.split(), "--metrics", "m.jsonl", cwd=home, ranks=2)
        found = losses(home / "m.jsonl")
        assert found[-1] < found[0]


@pytest.mark.parametrize(
    ("items", "words"),
    [
        (
            [([0.0], [0.0]), ([0.0, 1.0], [0.0])],
            "dataset[1] has shapes (2,) and (1,), but dataset[0] has (1,)",
        ),
        ([([0.0], [0]), ([0.0], [0.5])], "dataset[1] has dtype float64, but dataset[0] has int64"),
    ],
)
def test_samples_that_differ_from_the_first_are_rejected(items, words):
    with pytest.raises(DataError) as caught:
        samples_of_dataset(items).read(np.arange(2))
    assert words in str(caught.value)
