"""The model and the data of all examples: a linear map of 20 numbers, and 2048 noisy samples."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

_NUM_SAMPLES, _NUM_FEATURES = 2048, 20
_NOISE = 0.1  # standard deviation; the minimum of the loss is its square, 0.01


@dataclass(frozen=True, kw_only=True)
class Options:
    """The command line options of the examples; `--help` explains them."""

    steps: int
    batch_size: int
    lr: float
    seed: int
    init_timeout_s: float
    hang_timeout_s: float


def samples(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns float32 inputs (2048, 20), and targets (2048, 1), a linear map of the inputs plus noise."""
    generator = torch.Generator().manual_seed(seed)
    src = torch.randn(_NUM_SAMPLES, _NUM_FEATURES, generator=generator)
    tgt = src @ torch.randn(_NUM_FEATURES, 1, generator=generator)
    return src, tgt + _NOISE * torch.randn(_NUM_SAMPLES, 1, generator=generator)


class ParameterServer:
    """Keeps the parameters, and applies each gradient as soon as it arrives.

    All methods are thread-safe. Parameters and gradients are passed as one float32 vector.
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
        """Returns a copy of the parameters as a vector (21,)."""
        with self._lock:
            return parameters_to_vector(self._model.parameters()).detach().clone()

    def push(self, gradient: torch.Tensor) -> None:
        """Runs one optimizer step with a gradient (21,) that may belong to older parameters."""
        with self._lock:
            used = 0
            for parameter in self._model.parameters():
                parameter.grad = gradient[used : used + parameter.numel()].view_as(parameter)
                used += parameter.numel()
            self._optimizer.step()
            self.num_updates += 1

    def leave(self) -> None:
        """Records that a trainer has sent its last gradient."""
        with self._lock:
            self.num_training -= 1

    def result(self) -> dict[str, float]:
        """Returns the number of updates, and the initial and the current loss over all samples."""
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
    """Runs the training loop of a trainer: fetches the parameters, computes a gradient, and sends it.

    `share` is the index of this trainer and the number of trainers; each trainer uses different samples.
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
