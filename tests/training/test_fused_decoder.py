"""The decoder with its loss inside the model: losses and gradients are those of torch's cross entropy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from ddp_hpc.base.errors import DdpHpcError
from ddp_hpc.training.tasks.decoder import decoder
from ddp_hpc.training.tasks.task import SampleSpec, Task

from .graphs import Graphs
from .one_process import Steps

VOCABULARY, LENGTH = 100, 12
SIZES = {"layers": 2, "heads": 3, "width": 24}
SPEC = SampleSpec((LENGTH,), (LENGTH,), VOCABULARY)


def tokens(seed: int, samples: int = 5) -> Tensor:
    return torch.randint(VOCABULARY, (samples, LENGTH), generator=torch.Generator().manual_seed(seed))


def made(dtype: torch.dtype = torch.float64) -> Task:
    torch.manual_seed(0)
    task = decoder(SPEC, 0.0, **SIZES)
    task.model.to(dtype)
    return task


def both(dtype: torch.dtype = torch.float64) -> tuple[Task, Task]:
    """The decoder with torch's cross entropy of all scores, and with its own."""
    return replace(made(dtype), fused_loss=None), made(dtype)


def loss_of(task: Task, src: Tensor, tgt: Tensor) -> Tensor:
    if task.fused_loss is not None:
        return task.fused_loss(task.model, src, tgt)
    return task.loss(task.forward(task.model, src, tgt), tgt)


def test_the_loss_and_gradients_are_those_of_all_scores():
    plain, fused = both()
    losses = [loss_of(task, tokens(1), tokens(2)) for task in (plain, fused)]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-12, atol=0)
    for loss in losses:
        loss.backward()
    for theirs, ours in zip(plain.model.parameters(), fused.model.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-15)


def test_a_label_out_of_range_is_explained():
    fused = made()
    tgt = tokens(2)
    tgt[3, 4] = VOCABULARY + 2  # there is a padded score for this label
    with pytest.raises(
        DdpHpcError, match=r"contains the label 102, but the model has 100 classes \(0 to 99\)"
    ):
        loss_of(fused, tokens(1), tgt)


@pytest.fixture
def graphs() -> Iterator[None]:
    torch._dynamo.reset()
    with Graphs().used():
        yield


def batches():
    while True:
        yield tokens(1, 4), tokens(2, 4)


@pytest.mark.check
def test_compiled_steps_have_the_losses_and_names_of_eager_steps(graphs):
    eager = Steps(made(torch.float32), batches())
    compiled = Steps(made(torch.float32), batches(), compile="default")
    assert list(compiled.strategy.state().model) == list(eager.strategy.state().model)
    for steps in (eager, compiled):
        for _ in range(4):
            steps.step(4)
    assert compiled.losses() == pytest.approx(eager.losses(), rel=1e-5)


@pytest.mark.parametrize("model", ["decoder", "classifier"])
def test_a_wrong_label_in_compiled_steps_is_explained(graphs, model):
    def wrong():
        src, tgt = next(batches())
        yield src, tgt
        yield src, tgt.index_fill(0, torch.tensor([2]), VOCABULARY + 2)

    task = made(torch.float32)
    if model == "classifier":
        task = Task(model=nn.Sequential(nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)))
    steps = Steps(task, wrong(), compile="default")
    steps.step(4)
    with pytest.raises(DdpHpcError, match="contains the label 102, but the model has 100 classes"):
        steps.step(4)
