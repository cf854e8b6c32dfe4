"""What `ddp_hpc.snapshots` saves and restores, in one process: any models, optimizers and other objects."""

from __future__ import annotations

import math
import os
import signal
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import ddp_hpc
from tests.library.test_one_process import _at_home, _ends_with, no_launcher

__all__ = ["_at_home", "no_launcher"]
pytestmark = pytest.mark.usefixtures("no_launcher")

Loop = Callable[[], dict[str, Any]]


class Anything:
    """An object with a state."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def _step(objects: dict[str, Any]) -> None:
    """Trains one step, with random inputs."""
    models, optimizers = (
        list(objects[name].values()) if isinstance(objects[name], dict) else [objects[name]]
        for name in ("model", "optimizer")
    )
    loss = sum(model(torch.rand(3, 2)).square().sum() for model in models)
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step(lambda: loss) if isinstance(optimizer, torch.optim.LBFGS) else optimizer.step()
    if "scheduler" in objects:
        is_plateau = isinstance(objects["scheduler"], lr_scheduler.ReduceLROnPlateau)
        objects["scheduler"].step(*([float(loss)] if is_plateau else []))


def _values(objects: dict[str, Any]) -> list[Any]:
    models, optimizers = (
        list(objects[name].values()) if isinstance(objects[name], dict) else [objects[name]]
        for name in ("model", "optimizer")
    )
    rates = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
    return [*rates, *(parameter.tolist() for model in models for parameter in model.parameters())]


def _run(make: Loop, folder: str | None, *parts: int) -> list[Any]:
    """Trains in several attempts with this number of steps each; returns the final values."""
    objects: dict[str, Any] = {}
    for number, steps in enumerate(parts):
        torch.manual_seed(number)  # another one than in a run without interruption
        torch.manual_seed(0) if number == 0 else None
        objects = make()
        with ddp_hpc.distributed(), ddp_hpc.snapshots(folder, **objects) as snapshots:
            for step in range(snapshots.start + 1, snapshots.start + steps + 1):
                _step(objects)
                snapshots.step(step)
    return _values(objects)


def _assert_resumes_exactly(make: Loop) -> None:
    assert _run(make, "run", 3, 2, 4) == _run(make, None, 9)


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 4, 4], 0.5),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (step + 1)),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 7),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, 10),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 3),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=4), lr_scheduler.ExponentialLR(o, 0.9)], [4]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)], o
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_resumed_schedule_has_the_same_learning_rates(name: str) -> None:
    def make() -> dict[str, Any]:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        return {"model": model, "optimizer": optimizer, "scheduler": SCHEDULERS[name](optimizer)}

    _assert_resumes_exactly(make)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 0.1),
    "Adafactor": lambda p: torch.optim.Adafactor(p, 0.1),
    "LBFGS": lambda p: torch.optim.LBFGS(p, 0.1, max_iter=1),
    "a tensor as learning rate": lambda p: torch.optim.Adam(p, torch.tensor(0.1), foreach=False),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_resume_exactly(name: str) -> None:
    def make() -> dict[str, Any]:
        model = nn.Linear(2, 1)
        return {"model": model, "optimizer": OPTIMIZERS[name](model.parameters())}

    _assert_resumes_exactly(make)


def test_several_models_and_optimizers_resume_exactly() -> None:
    def make() -> dict[str, Any]:
        models = {"generator": nn.Linear(2, 2), "discriminator": nn.Linear(2, 1)}
        optimizers = {name: torch.optim.Adam(model.parameters()) for name, model in models.items()}
        return {"model": models, "optimizer": optimizers}

    _assert_resumes_exactly(make)
    from safetensors import safe_open

    with safe_open("run/step_00000009/model-00000.safetensors", "pt") as file:
        assert set(file.keys()) == {
            f"{name}.{tensor}" for name in ("generator", "discriminator") for tensor in ("weight", "bias")
        }


def test_models_and_optimizers_can_be_lists() -> None:
    models = [nn.Linear(2, 1), nn.Linear(2, 1)]
    optimizer = torch.optim.SGD([p for model in models for p in model.parameters()], 0.1)
    with ddp_hpc.distributed(), ddp_hpc.snapshots("run", model=models, optimizer=(optimizer,)) as snapshots:
        snapshots.step(1)
    assert Path("run/step_00000001").exists()


class Pair(NamedTuple):
    a: int
    b: str


VALUES = [
    {"n": 3, "x": -0.1, "t": (1, [2, None, True]), "text": "ü\n\ud800", "empty": {}},
    {1: "a", (2, "b"): 0.5, None: 1, "d": OrderedDict(x=1)},
    {"nan": float("nan"), "infinite": [math.inf, -math.inf], "large": 2**200},
    {"set": {1, 2}, "frozen": frozenset({3}), "bytes": b"\x00\xff", "pair": Pair(1, "b")},
    Counter({3: 2}),
    {"state": np.random.default_rng(0).bit_generator.state, "number": np.float32(0.1)},
    {"empty": np.zeros((2, 0)), "not contiguous": np.arange(6).reshape(2, 3).T},
    [torch.tensor(3), torch.rand(2, 3).to(torch.bfloat16), torch.tensor([True]), torch.zeros(0)],
    [np.arange(5, dtype=np.uint16), np.array([1 + 2j]), np.array(True)],
    torch.Generator().manual_seed(7).get_state(),
    [torch.full((1,), float(i)) for i in range(12)],
    None,
]  # fmt: skip


def _equal(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, dict):
        return list(ours) == list(theirs) and all(_equal(ours[key], theirs[key]) for key in ours)
    if isinstance(ours, list | tuple):
        return type(ours) is type(theirs) and all(_equal(*pair) for pair in zip(ours, theirs, strict=True))
    if isinstance(ours, torch.Tensor):
        return ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    if isinstance(ours, np.ndarray | np.generic):
        return type(ours) is type(theirs) and ours.dtype == theirs.dtype and np.array_equal(ours, theirs)
    return type(ours) is type(theirs) and (ours == theirs or ours != ours)


@pytest.mark.parametrize("number", range(len(VALUES)))
def test_any_state_is_restored_with_its_types(number: int) -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    types = {"d": OrderedDict(), "pair": Pair(0, "")}
    restored = Anything(Counter() if isinstance(VALUES[number], Counter) else types)
    for thing in (Anything(VALUES[number]), restored):
        with (
            ddp_hpc.distributed(),
            ddp_hpc.snapshots("run", model=model, optimizer=optimizer, thing=thing) as snapshots,
        ):
            snapshots.step(snapshots.start + 1)
    assert _equal(restored.state, VALUES[number]), restored.state
    assert type(restored.state) is type(VALUES[number])


def test_a_second_copy_of_the_model_is_restored() -> None:
    averages = []
    for _ in range(2):
        torch.manual_seed(len(averages))
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        averages.append(torch.optim.swa_utils.AveragedModel(model))
        with (
            ddp_hpc.distributed(),
            ddp_hpc.snapshots("run", model=model, optimizer=optimizer, ema=averages[-1]) as snapshots,
        ):
            snapshots.step(snapshots.start + 1)
    for ours, theirs in zip(averages[1].parameters(), averages[0].parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_scaler_is_restored() -> None:
    scales = []
    for _ in range(2):
        model = nn.Linear(2, 1)
        optimizer, scaler = (
            torch.optim.SGD(model.parameters(), 0.1),
            torch.amp.GradScaler("cpu", init_scale=4.0),
        )
        with (
            ddp_hpc.distributed(),
            ddp_hpc.snapshots("run", model=model, optimizer=optimizer, scaler=scaler) as snapshots,
        ):
            scaler.scale(model(torch.tensor([[1.0, math.inf]])).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            snapshots.step(snapshots.start + 1)
    assert scales == [2.0, 1.0]


def _refused(words: str, capsys: pytest.CaptureFixture[str], **objects: Any) -> None:
    model = nn.Linear(2, 1)
    given = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1), **objects}
    with _ends_with(2), ddp_hpc.snapshots("run", **given) as snapshots:
        snapshots.step(1)
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert words in line


OTHER = nn.Linear(2, 1)


@pytest.mark.parametrize(
    ("objects", "words"),
    [
        ({"every_step": 10}, '(every_step=) got int, which has no state_dict and load_state_dict (did you'),
        ({"scheduler": None}, "snapshots(scheduler=) got NoneType, which has no state_dict"),
        ({"thing": Anything({"a": [object()]})}, "state of thing['a'][0] has the type object, which a"),
        ({"thing": Anything(torch.ones(2).to_sparse())}, "state of thing has the type torch.float32"),
        ({"model": "linear"}, "(model=): a Module, or a list or dict of several, is required (got str)"),
        ({"model": []}, "(model=): a Module, or a list or dict of several, is required (got none)"),
        ({"optimizer": [3]}, "an Optimizer, or a list or dict of several, is required (got int)"),
        ({"model": OTHER}, "a parameter of shape (1, 2) of SGD belongs to no model, or to two optimizers"),
        (
            {"model": OTHER, "optimizer": [torch.optim.SGD(OTHER.parameters(), 0.1)] * 2},
            "belongs to no model, or to two optimizers",
        ),
    ],
)  # fmt: skip
def test_objects_that_cannot_be_saved_are_refused_before_the_first_step(
    objects: dict[str, Any], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _refused(words, capsys, **objects)
    assert not Path("run").exists()


def test_a_snapshot_with_other_objects_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with (
        ddp_hpc.distributed(),
        ddp_hpc.snapshots("run", model=model, optimizer=optimizer, scaler=Anything(1)) as snapshots,
    ):
        snapshots.step(1)
    capsys.readouterr()
    _refused("contains the state of other objects: scaler, not ema, scaler. Use the same", capsys,
             ema=Anything(1), scaler=Anything(1))  # fmt: skip


def test_without_a_loader_no_samples_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        with ddp_hpc.distributed(), ddp_hpc.snapshots("run", model=model, optimizer=optimizer) as snapshots:
            snapshots.step(snapshots.start + 5)
    assert "resuming after step 5\n" in capsys.readouterr().err
    with _ends_with(2) as world:
        loader = world.loader((torch.zeros(4, 2), torch.zeros(4, 1)))
        with ddp_hpc.snapshots("run", model=model, optimizer=optimizer, loader=loader):
            pass
    assert "was made without a loader. Call ddp_hpc.snapshots() without loader=" in capsys.readouterr().err


def test_a_snapshot_made_with_a_loader_is_refused_without_one(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with ddp_hpc.distributed() as world:
        loader = world.loader((torch.zeros(4, 2), torch.zeros(4, 1)), batch_size=2)
        with ddp_hpc.snapshots("run", model=model, optimizer=optimizer, loader=loader) as snapshots:
            for batch in loader:
                snapshots.step(batch.step)
    _refused("was made with a loader. Call ddp_hpc.snapshots() with loader=", capsys, model=model,
             optimizer=optimizer)  # fmt: skip


def test_a_program_that_requests_another_job_in_the_loop_ends_with_75() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with _ends_with(75), ddp_hpc.snapshots("run", model=model, optimizer=optimizer) as snapshots:
        deadline = ddp_hpc.deadline()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert deadline.should_stop()
        snapshots.step(1)
        deadline.requeue(1)
    assert Path("run/step_00000001").exists()
