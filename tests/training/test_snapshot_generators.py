"""The state of torch's, NumPy's and Python's generators is restored, including cached Gaussian values."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from ddp_hpc.training.snapshots.random_state import generator_state, seed_generators, set_generator_state

CPU = torch.device("cpu")


def _draw() -> list[float]:
    return [
        *torch.rand(3).tolist(),
        *torch.randn(3).tolist(),
        *np.random.standard_normal(3).tolist(),
        np.random.random(),
        random.gauss(0, 1),
        random.random(),
    ]


@pytest.mark.parametrize("used", range(3))
def test_restored_generators_draw_the_same_numbers(used: int) -> None:
    seed_generators(3)
    for _ in range(used):  # Gaussian values are generated in pairs, and the second one is cached
        np.random.standard_normal()
        random.gauss(0, 1)
        torch.randn(1)
    state = generator_state(CPU)
    expected = _draw()
    _draw()
    set_generator_state(state, CPU)
    assert _draw() == expected


def test_the_same_seed_gives_the_same_numbers() -> None:
    seed_generators(2**63 - 1)
    first = _draw()
    seed_generators(2**63 - 1)
    assert _draw() == first
    seed_generators(4)
    assert not set(_draw()) & set(first)


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state[:-1],
        lambda state: torch.cat([state, state[:16]]),
        lambda state: state[:0],
        lambda state: state.to(torch.int32),
        lambda state: state.reshape(1, -1),
    ],
)
def test_an_invalid_state_is_rejected_and_changes_nothing(change) -> None:  # type: ignore[no-untyped-def]
    state = generator_state(CPU)
    with pytest.raises(ValueError, match="the state has"):
        set_generator_state(change(state), CPU)
    assert torch.equal(generator_state(CPU), state)
