"""The decoder as a model: its context, how it can be split, and invalid options."""

from __future__ import annotations

import pytest
import torch

from ddp_hpc.base.errors import RequestError
from ddp_hpc.training.tasks.decoder import decoder
from ddp_hpc.training.tasks.task import SampleSpec, Task

SPEC = SampleSpec((16,), (16,), 256)


def made(dropout: float = 0.0, spec: SampleSpec = SPEC, **options: object) -> Task:
    torch.manual_seed(0)
    return decoder(spec, dropout, **{"layers": 4, "heads": 2, "width": 8, **options})


def tokens(samples: int = 3, length: int = 16) -> torch.Tensor:
    return torch.randint(256, (samples, length), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def test_a_score_depends_only_on_earlier_tokens():
    model = made().model
    one, other = tokens(), tokens()
    other[:, 9] = (other[:, 9] + 1) % 256
    before, after = model(one), model(other)
    assert torch.equal(before[:, :9], after[:, :9])
    assert bool((before[:, 9:] != after[:, 9:]).any(-1).all())


def test_the_head_shares_the_weights_of_the_embedding_by_default():
    tied, untied = made().model, made(tied=False).model
    num_tied, num_untied = (sum(p.numel() for p in model.parameters()) for model in (tied, untied))
    assert num_untied - num_tied == 256 * 8
    tied(tokens()).sum().backward()
    assert tied.head.scores.weight.grad is tied.embedding.tokens.weight.grad


@torch.no_grad()
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_the_stages_together_equal_the_model(num_stages):
    task = made(tied=False)
    assert task.stages is not None
    stages = task.stages(task.model, num_stages)
    assert len(stages) == num_stages
    x = tokens()
    for stage in stages:
        x = stage(x)
    assert torch.equal(x, task.model(tokens()))
    of_stages = [id(parameter) for stage in stages for parameter in stage.parameters()]
    assert sorted(of_stages) == sorted(id(parameter) for parameter in task.model.parameters())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"layers": 0}, "layers must be a positive integer (got 0)"),
        ({"heads": -1}, "heads must be a positive integer (got -1)"),
        ({"width": 8.0}, "width must be a positive integer (got 8.0)"),
        ({"layers": True}, "layers must be a positive integer (got True)"),
        ({"width": "wide"}, "width must be a positive integer (got wide)"),
        ({"tied": "no"}, "tied must be True or False (got no)"),
        ({"width": 10, "heads": 4}, "a multiple of heads=4 (got 10); the nearest is 8"),
        ({"width": 1, "heads": 4}, "the nearest is 4"),
        ({"spec": SampleSpec((16,), (15,), 256)}, "src (16,), tgt (15,) and 256 classes"),
        ({"spec": SampleSpec((1, 16), (1, 16), 256)}, "requires samples of tokens"),
        ({"spec": SampleSpec((16,), (16,), None)}, "and no classes; `python -m data_gen text`"),
    ],
)
def test_invalid_decoder_options_are_rejected_in_one_line(options, words):
    with pytest.raises(RequestError) as caught:
        made(**options)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("options", "num_stages", "words"),
    [({}, 2, "use --model-option tied=False"), ({"tied": False}, 5, "layers=5")],
)
def test_invalid_stages_are_rejected_in_one_line(options, num_stages, words):
    task = made(**options)
    assert task.stages is not None
    with pytest.raises(RequestError, match=words):
        task.stages(task.model, num_stages)
