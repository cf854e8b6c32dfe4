"""What the parameter servers beside this file train: a linear map of 20 numbers, from 2048 noisy samples."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

_NUM_SAMPLES, _NUM_FEATURES = 2048, 20
_NOISE = 0.1  # so the loss cannot fall below 0.01


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of the examples, which `--help` explains."""

    steps: int
    batch_size: int
    lr: float
    seed: int
    init_timeout_s: float
    hang_timeout_s: float


def samples(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs (2048, 20) and targets (2048, 1), float32: a fixed linear map of the inputs, plus noise."""
    generator = torch.Generator().manual_seed(seed)
    src = torch.randn(_NUM_SAMPLES, _NUM_FEATURES, generator=generator)
    tgt = src @ torch.randn(_NUM_FEATURES, 1, generator=generator)
    return src, tgt + _NOISE * torch.randn(_NUM_SAMPLES, 1, generator=generator)


class ParameterServer:
    """Holds the parameters; every gradient that comes is applied at once, whoever sent it.

    Several threads may call it. Parameters and gradients travel as one vector, float32.
    """

    def __init__(self, options: Options, num_trainers: int) -> None:
        torch.manual_seed(options.seed)
        self._model = nn.Linear(_NUM_FEATURES, 1)
        self._optimizer = torch.optim.SGD(self._model.parameters(), options.lr)
        self._data = samples(options.seed)
        self._lock = threading.Lock()
        self._first_loss = self._loss()
        self.num_training = num_trainers
        self.num_updates = 0

    def pull(self) -> torch.Tensor:
        """A copy of the parameters, (21,)."""
        with self._lock:
            return parameters_to_vector(self._model.parameters()).detach().clone()

    def push(self, gradient: torch.Tensor) -> None:
        """One step of the optimizer with this gradient, (21,), which may be of older parameters."""
        with self._lock:
            used = 0
            for parameter in self._model.parameters():
                parameter.grad = gradient[used : used + parameter.numel()].view_as(parameter)
                used += parameter.numel()
            self._optimizer.step()
            self.num_updates += 1

    def leave(self) -> None:
        """A trainer has sent its last gradient."""
        with self._lock:
            self.num_training -= 1

    def result(self) -> dict[str, float]:
        """What came of it, with the loss over all samples at the start and now."""
        return {
            "num_updates": self.num_updates,
            "first_loss": self._first_loss,
            "final_loss": self._loss(),
        }

    def _loss(self) -> float:
        src, tgt = self._data
        with torch.no_grad():
            return nn.functional.mse_loss(self._model(src), tgt).item()


def train(
    options: Options,
    share: tuple[int, int],
    pull: Callable[[], torch.Tensor],
    push: Callable[[torch.Tensor], None],
    at: Callable[[int], None] = lambda _: None,
) -> None:
    """A trainer's loop: fetch the parameters, send the gradient of a batch, wait for nobody but the server.

    `share` is (number of this trainer, number of trainers): each has samples of its own.
    `at` is called with the number of each step.
    """
    trainer, num_trainers = share
    src, tgt = (part[trainer::num_trainers] for part in samples(options.seed))
    generator = torch.Generator().manual_seed(options.seed + 1 + trainer)
    model = nn.Linear(_NUM_FEATURES, 1)
    for step in range(options.steps):
        at(step)
        vector_to_parameters(pull(), model.parameters())
        batch = torch.randint(len(src), (options.batch_size,), generator=generator)
        loss = nn.functional.mse_loss(model(src[batch]), tgt[batch])
        push(parameters_to_vector(torch.autograd.grad(loss, list(model.parameters()))))
