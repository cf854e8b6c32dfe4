"""Saves and restores the state of all random number generators of a process as one tensor of bytes."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_WORDS = 624  # size of the state of the Mersenne Twister in Python and NumPy


def seed_generators(seed: int) -> None:
    """Seeds the generators of torch, NumPy and Python."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def generator_state(device: torch.device) -> Tensor:
    """Returns the state of the generators of torch on the CPU and `device`, NumPy and Python: uint8, 1-d.

    The length is the same for all ranks with the same kind of device.
    """
    _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    _, words, gauss = random.getstate()
    own: list[NDArray[Any]] = [
        np.asarray(keys, np.uint32),
        np.array([position, has_gauss], np.uint32),
        np.array([cached], np.float64),
        np.array(words, np.uint32),
        np.array([gauss is not None], np.uint32),
        np.array([gauss or 0.0], np.float64),
    ]
    packed = torch.frombuffer(bytearray(b"".join(part.tobytes() for part in own)), dtype=torch.uint8)
    return torch.cat([packed, torch.get_rng_state(), _device_state(device)])


def set_generator_state(state: Tensor, device: torch.device) -> None:
    """Restores a state returned by `generator_state`, on the same kind of device.

    Raises:
        ValueError: the state is from another kind of device or another version of torch.
    """
    current = generator_state(device)
    if state.shape != current.shape or state.dtype != current.dtype:
        raise ValueError(
            f"the state has {state.numel()} values of {state.dtype}; this process requires {current.numel()} "
            f"values of {current.dtype}"
        )
    content = state.cpu().numpy().tobytes()
    layout = np.dtype(
        [
            ("keys", np.uint32, _WORDS),
            ("position", np.uint32, 2),
            ("cached", np.float64),
            ("words", np.uint32, _WORDS + 1),
            ("has_gauss", np.uint32),
            ("gauss", np.float64),
        ]
    )
    own = np.frombuffer(content, layout, count=1)[0]
    position, has_cached = own["position"].tolist()
    np.random.set_state(("MT19937", own["keys"], position, has_cached, float(own["cached"])))
    gauss = float(own["gauss"]) if own["has_gauss"] else None
    random.setstate((3, tuple(own["words"].tolist()), gauss))
    rest = state.cpu()[layout.itemsize :]
    on_cpu = torch.get_rng_state().numel()
    torch.set_rng_state(rest[:on_cpu].clone())
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(rest[on_cpu:].clone(), device)


def _device_state(device: torch.device) -> Tensor:
    if device.type == "cpu":
        return torch.empty(0, dtype=torch.uint8)
    state: Tensor = torch.get_device_module(device).get_rng_state(device)
    return state.cpu()
