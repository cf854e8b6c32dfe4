"""The built-in tasks: a model, how its loss is taken, and how right it is.

Shapes: B batch, S source length, T target length, E embedding, C classes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn
from torch.nn import functional

from ddp_hpc.errors import RequestError

_HEADS = 8  # torch.nn.Transformer's default


@dataclass(frozen=True)
class SampleSpec:
    """What one sample looks like, without the batch axis."""

    src_shape: tuple[int, ...]
    tgt_shape: tuple[int, ...]
    num_classes: int | None  # for integer targets


@dataclass(frozen=True)
class Task:
    """What the loop needs to know of a model.

    `forward` gives the model's output for a batch; `loss` the mean loss over the
    batch as a scalar tensor, every sample weighing the same; `num_correct` how
    many of a batch's predictions are right (None: no such notion).
    """

    build: Callable[[SampleSpec, float], nn.Module]
    forward: Callable[[nn.Module, Tensor, Tensor], Tensor]
    loss: Callable[[Tensor, Tensor], Tensor]
    num_correct: Callable[[Tensor, Tensor], Tensor] | None = None

    def tgt_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The type of targets beside inputs of `dtype`: labels are counted, everything else is a number."""
        return torch.int64 if self.num_correct is not None else dtype


def _build_transformer(spec: SampleSpec, dropout: float) -> nn.Module:
    if len(spec.src_shape) != 2 or len(spec.tgt_shape) != 2 or spec.src_shape[1] != spec.tgt_shape[1]:
        raise RequestError(
            f"--model transformer needs samples of (length, embedding), one embedding for both; "
            f"the data has src {spec.src_shape} and tgt {spec.tgt_shape}"
        )
    embedding = spec.src_shape[1]
    if embedding % _HEADS:
        raise RequestError(
            f"--model transformer has {_HEADS} attention heads, which do not divide the embedding "
            f"{embedding}; the nearest that works is {max(_HEADS, round(embedding / _HEADS) * _HEADS)}"
        )
    return nn.Transformer(d_model=embedding, nhead=_HEADS, dropout=dropout, batch_first=True)


class Classifier(nn.Module):
    """Two convolutions and two dense layers, for images (C, H, W) or (H, W); dense only for vectors."""

    def __init__(self, shape: tuple[int, ...], num_classes: int, dropout: float) -> None:
        super().__init__()
        if len(shape) == 1:
            self.features: nn.Module = nn.Identity()
            width = shape[0]
        else:
            channels = shape[0] if len(shape) == 3 else 1
            height, across = shape[-2:]
            pool = nn.MaxPool2d(2) if min(height, across) >= 4 else nn.Identity()
            self.features = nn.Sequential(
                nn.Conv2d(channels, 32, 3, padding=1),
                nn.ReLU(),
                nn.Conv2d(32, 64, 3, padding=1),
                nn.ReLU(),
                pool,
            )
            shrink = 2 if min(height, across) >= 4 else 1
            width = 64 * (height // shrink) * (across // shrink)
        self.with_channel = len(shape) == 2
        self.head = nn.Sequential(
            nn.Flatten(), nn.Linear(width, 128), nn.ReLU(), nn.Dropout(dropout), nn.Linear(128, num_classes)
        )

    def forward(self, images: Tensor) -> Tensor:
        """Scores (B, classes) of images (B, C, H, W), (B, H, W) or vectors (B, E)."""
        if self.with_channel:
            images = images.unsqueeze(1)  # (B, 1, H, W)
        scores: Tensor = self.head(self.features(images))
        return scores


def _build_classifier(spec: SampleSpec, dropout: float) -> nn.Module:
    if spec.num_classes is None or spec.tgt_shape != () or not 1 <= len(spec.src_shape) <= 3:
        raise RequestError(
            "--model classifier needs images (C, H, W), (H, W) or vectors, and one integer label a sample; "
            f"the data has src {spec.src_shape} and tgt {spec.tgt_shape}"
        )
    return Classifier(spec.src_shape, spec.num_classes, dropout)


def _build_linear(spec: SampleSpec, dropout: float) -> nn.Module:
    del dropout  # a linear map has none
    return nn.Sequential(nn.Flatten(), nn.Linear(prod(spec.src_shape), prod(spec.tgt_shape)))


def _num_correct(scores: Tensor, labels: Tensor) -> Tensor:
    return (scores.argmax(dim=1) == labels).sum()


TASKS: dict[str, Task] = {
    # Cross entropy between the output and the target as probabilities along T, as the lesson has it.
    "transformer": Task(
        build=_build_transformer,
        forward=lambda model, src, tgt: model(src, tgt),
        loss=functional.cross_entropy,
    ),
    "classifier": Task(
        build=_build_classifier,
        forward=lambda model, src, _: model(src),
        loss=functional.cross_entropy,
        num_correct=_num_correct,
    ),
    "linear": Task(
        build=_build_linear,
        forward=lambda model, src, _: model(src),
        loss=lambda output, tgt: functional.mse_loss(output, tgt.flatten(1)),
    ),
}


def build_model(name: str, spec: SampleSpec, dropout: float, seed: int, dtype: torch.dtype) -> nn.Module:
    """The task's model on the CPU, its parameters drawn right after `torch.manual_seed(seed)`.

    Raises:
        RequestError: where the samples' shapes do not fit the model.
    """
    torch.manual_seed(seed)
    return TASKS[name].build(spec, dropout).to(dtype)
