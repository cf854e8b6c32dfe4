"""Factories whose tensors are freed while they run, and computed again."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ddp_hpc.training.tasks import recorded_init, recorded_operations
from ddp_hpc.training.tasks.initial_values import InitialValues, named_tensors, with_memory, without_memory
from ddp_hpc.training.tasks.recorded_init import Recorder
from ddp_hpc.training.tasks.recorded_operations import NotReproducibleError


@pytest.fixture(autouse=True)
def _frees_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded_init, "RESIDENT_BYTES", 0)
    monkeypatch.setattr(recorded_operations, "SMALLEST_BYTES", 1)


def _recorded(factory: Callable[[], nn.Module]) -> tuple[nn.Module, Recorder]:
    torch.manual_seed(3)
    recorder = Recorder()
    with recorder.recording():
        return factory(), recorder


def _plain(factory: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return factory()


def _holder(*tensors: Tensor) -> nn.Module:
    """A module with these parameters, and a last one, after which the memory of the others is freed."""
    module = nn.Module()
    for number, tensor in enumerate((*tensors, torch.zeros(1))):
        module.register_parameter(f"p{number}", nn.Parameter(tensor))
    return module


def _transposed() -> nn.Module:
    linear = nn.Linear(6, 4)
    linear.weight.data = torch.randn(6, 4).t()
    return nn.Sequential(linear, nn.Linear(4, 2))


def _in_rows() -> nn.Module:
    module = _holder(torch.empty(4, 6))
    with torch.no_grad():
        for row in module.p0:
            row.normal_()
        module.p0[1].copy_(module.p0[0])
    return module


def _with_own_generator() -> nn.Module:
    generator = torch.Generator().manual_seed(9)
    return _holder(torch.rand(5, 5, generator=generator), torch.randn(5, generator=generator))


def _data_dependent() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    with torch.no_grad():
        model[0].weight.div_(model(torch.randn(20, 6)).std())
        if model[0].weight.sum() > 0:
            model[2].weight.neg_()
    return model


def _in_half() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)).to(torch.bfloat16).double()


def _normed() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 5)), nn.LSTM(5, 4, 2))


FACTORIES: list[Callable[[], nn.Module]] = [
    lambda: nn.Transformer(16, 4, 2, 2, 32, batch_first=True),
    lambda: nn.Sequential(nn.Embedding(9, 4, padding_idx=2), nn.Conv1d(4, 4, 3), nn.BatchNorm1d(4)),
    lambda: _holder(*torch.randn(3, 4, 4).unbind(0)),
    lambda: _holder(torch.stack([torch.randn(4) for _ in range(5)]) * 0.02, torch.tensor([1.0, 2.0])),
    lambda: _holder(nn.init.orthogonal_(torch.empty(7, 5)), nn.init.sparse_(torch.empty(7, 5), 0.3)),
    _transposed,
    _in_rows,
    _with_own_generator,
    _data_dependent,
    _in_half,
    _normed,
]


@pytest.mark.parametrize("factory", FACTORIES, ids=range(len(FACTORIES)))
def test_values_and_random_numbers_are_those_of_a_plain_call(factory: Callable[[], nn.Module]) -> None:
    expected = _plain(factory)
    state = torch.get_rng_state()
    model, recorder = _recorded(factory)
    assert torch.equal(torch.get_rng_state(), state)
    initial = without_memory(model, recorder, lambda: pytest.fail("not needed"), print)
    assert any(recipe.kept is None for recipe in initial.recipes.values())
    assert all(tensor.is_meta for tensor in named_tensors(model).values())
    with_memory(model, initial)
    for name, tensor in named_tensors(expected).items():
        found = named_tensors(model)[name]
        assert torch.equal(found, tensor), name
        assert (found.dtype, found.requires_grad) == (tensor.dtype, tensor.requires_grad)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_parameter_that_is_used_through_numpy_keeps_what_was_written() -> None:
    def factory() -> nn.Module:
        module = _holder(torch.randn(6, 6))
        values = module.p0.detach().numpy()
        module.extra = nn.Linear(6, 6)
        values[:] = 7
        return module

    model, recorder = _recorded(factory)
    assert (recorder.recipes(named_tensors(model))["p0"].values() == 7).all()


def test_tensors_that_are_not_part_of_the_model_have_their_memory_after_the_factory() -> None:
    others = {}

    def factory() -> nn.Module:
        others["teacher"], others["data"] = nn.Linear(6, 6), torch.randn(30, 6)
        return nn.Linear(6, 1)

    _plain(factory)
    expected = dict(others)
    model, recorder = _recorded(factory)
    recorder.recipes(named_tensors(model))
    assert torch.equal(others["data"], expected["data"])
    assert torch.equal(others["teacher"].weight, expected["teacher"].weight)


def test_tied_parameters_stay_one_parameter_without_and_with_memory() -> None:
    def factory() -> nn.Module:
        first = nn.Linear(5, 5)
        second = copy.deepcopy(first)
        second.weight = first.weight
        return nn.Sequential(first, second)

    model, recorder = _recorded(factory)
    weight = model[0].weight
    initial = without_memory(model, recorder, lambda: pytest.fail("not needed"), print)
    assert model[0].weight is model[1].weight is weight
    with_memory(model, initial)
    assert model[0].weight is model[1].weight is weight
    assert len(list(model.parameters())) == 3


def test_at_most_the_limit_and_one_tensor_are_in_memory_while_the_factory_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recorded_init, "RESIDENT_BYTES", 3 * 4 * 100 * 100)
    most = 0

    def factory() -> nn.Module:
        nonlocal most
        model = nn.Sequential(*(nn.Linear(100, 100, bias=False) for _ in range(20)))
        for layer in model:
            nn.init.normal_(layer.weight)
            with torch._C.DisableTorchFunction():
                sizes = [one.weight.untyped_storage().nbytes() for one in model]
            most = max(most, sum(sizes))
        return model

    _recorded(factory)
    assert 0 < most <= (3 + 1) * 4 * 100 * 100


def test_the_digest_depends_on_seeds_operations_and_constants() -> None:
    def digest(seed: int, std: float, constant: float) -> str:
        def factory() -> nn.Module:
            torch.manual_seed(seed)
            return _holder(torch.randn(8, 8) * std + torch.tensor(constant))

        model, recorder = _recorded(factory)
        return InitialValues(recorder.recipes(named_tensors(model)), lambda: model, print).digest

    digests = {digest(1, 0.1, 0.0), digest(2, 0.1, 0.0), digest(1, 0.2, 0.0), digest(1, 0.1, 0.5)}
    assert len(digests) == 4
    assert digest(1, 0.1, 0.0) in digests


def test_a_change_that_was_not_recorded_is_detected_while_the_factory_runs() -> None:
    def factory() -> nn.Module:
        module = _holder(torch.randn(6, 6))
        with torch.no_grad():
            module.p0.mul_(2)
            with torch._C._DisableTorchDispatch():
                module.p0.fill_(3)
            module.p1.mul_(2)
            module.p0.mul_(2)
        return module

    with pytest.raises(NotReproducibleError):
        _recorded(factory)
