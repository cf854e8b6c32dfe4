"""The cross entropy of the decoder's head: values and gradients of torch's, with less memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from ddp_hpc.training.tasks import linear_cross_entropy as module
from ddp_hpc.training.tasks.linear_cross_entropy import linear_cross_entropy, padded_linear

TOKENS, WIDTH = 50, 16
# Blocks of 7 tokens with a vocabulary of up to 64, of 3 with one of up to 128, or all tokens at once.
SOME, ALL = 64 * 7, 2**28


def inputs(vocabulary: int, dtype: torch.dtype = torch.float64, tokens: int = TOKENS) -> list[Tensor]:
    """Vectors, a weight and labels. All scores are low, so that padding with zeros would be likely."""
    draw = torch.Generator().manual_seed(1)
    x = torch.rand(tokens, WIDTH, generator=draw, dtype=dtype)
    weight = -5 * torch.rand(vocabulary, WIDTH, generator=draw, dtype=dtype)
    return [x.requires_grad_(), weight.requires_grad_(), torch.randint(vocabulary, (tokens,), generator=draw)]


def torchs(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(functional.linear(x, weight), labels)


def gradients(loss: Tensor, *of: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(3 * loss, of)


@pytest.fixture(params=[SOME, ALL], ids=["blocks", "at once"])
def most_scores(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(module, "_MOST_SCORES", request.param)
    return request.param


@pytest.mark.parametrize("vocabulary", [37, 64, 65])
def test_loss_and_gradients_equal_those_of_torch(vocabulary, most_scores):
    x, weight, labels = inputs(vocabulary)
    labels[::3] = -100  # ignored, without weight in the mean
    ours, theirs = linear_cross_entropy(x, weight, labels), torchs(x, weight, labels)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(gradients(ours, x, weight), gradients(theirs, x, weight))


@pytest.mark.parametrize("name", ["x", "weight"])
def test_a_frozen_input_gets_no_gradient(name, most_scores):
    x, weight, labels = inputs(37)
    frozen, other = (x, weight) if name == "x" else (weight, x)
    frozen.requires_grad_(requires_grad=False)
    [ours] = gradients(linear_cross_entropy(x, weight, labels), other)
    [theirs] = gradients(torchs(x, weight, labels), other)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("vocabulary", [37, 64])
def test_scores_of_a_padded_product_are_those_of_the_vocabulary(vocabulary):
    x, weight, _ = inputs(vocabulary)
    torch.testing.assert_close(padded_linear(x, weight), functional.linear(x, weight))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mixed_precision_is_as_exact_as_with_torchs_functions(dtype, most_scores):
    x, weight, labels = inputs(65, torch.float32, tokens=700)
    exact = [value.detach().double().requires_grad_() for value in (x, weight)]
    wanted = gradients(torchs(*exact, labels), *exact)

    def errors(function):
        with torch.autocast("cpu", dtype=dtype):
            loss = function(x, weight, labels)
        assert loss.dtype == torch.float32
        # float16 needs a scaled loss: a gradient is divided by the number of tokens.
        found = [grad / 2**12 for grad in gradients(2**12 * loss, x, weight)]
        return [float((one - good).norm() / good.norm()) for one, good in zip(found, wanted, strict=True)]

    for ours, theirs in zip(errors(linear_cross_entropy), errors(torchs), strict=True):
        assert ours < 1.5 * theirs


class Largest(TorchDispatchMode):
    """Records the largest number of values of a tensor of each type that an operator returns."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[torch.dtype, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for one in result if isinstance(result, tuple | list) else [result]:
            if isinstance(one, Tensor):
                self.found[one.dtype] = max(self.found.get(one.dtype, 0), one.numel())
        return result


def saved_by(function, *values, dtype=torch.bfloat16):
    """The loss, and the number of values of each type that autograd keeps for the backward pass."""
    saved: dict[torch.dtype, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        saved[tensor.dtype] = max(saved.get(tensor.dtype, 0), tensor.numel())
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", dtype=dtype):
        loss = function(*values)
    return loss, saved


def test_no_tensor_has_all_scores_and_none_of_its_size_is_kept(monkeypatch):
    monkeypatch.setattr(module, "_MOST_SCORES", 100 * 128)
    x, weight, labels = inputs(100, torch.float32, tokens=700)
    with Largest() as largest:
        loss, saved = saved_by(linear_cross_entropy, x, weight, labels)
        gradients(loss, x, weight)
    assert max(largest.found.values()) <= 100 * 128 < 700 * 100
    assert max(saved.values()) <= 700 * WIDTH
    with Largest() as largest:  # the same measurement finds the scores of torch's functions
        _, saved = saved_by(torchs, x, weight, labels)
    assert largest.found[torch.float32] == saved[torch.float32] == 700 * 100


def test_compiled_code_keeps_no_scores_in_float32():
    torch._dynamo.reset()
    x, weight, labels = inputs(100, torch.float32, tokens=700)
    compiled = torch.compile(linear_cross_entropy, backend="aot_eager_decomp_partition", fullgraph=True)
    loss, saved = saved_by(compiled, x, weight, labels)
    assert saved[torch.bfloat16] >= 700 * 100
    assert saved.get(torch.float32, 0) < 700 * 100
    _, of_torch = saved_by(torchs, x, weight, labels)
    assert of_torch[torch.float32] == 700 * 100
    eager, _ = saved_by(linear_cross_entropy, x, weight, labels)
    torch.testing.assert_close(loss, eager, rtol=1e-3, atol=0)
    for one, other in zip(gradients(loss, x, weight), gradients(eager, x, weight), strict=True):
        torch.testing.assert_close(one, other, rtol=0.05, atol=0.02 * float(other.abs().max()))
