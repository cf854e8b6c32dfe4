"""The built-in tasks.

Shapes: B batch, S source length, T target length, E embedding, C classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from ddp_hpc.base.errors import RequestError
from ddp_hpc.base.named_object import find_named
from ddp_hpc.training.tasks.decoder import decoder
from ddp_hpc.training.tasks.split_layers import split_evenly
from ddp_hpc.training.tasks.task import Factory, SampleSpec, Task, label_loss

_HEADS = 8  # the default of torch.nn.Transformer


def transformer(spec: SampleSpec, dropout: float) -> Task:
    """Returns a task with torch.nn.Transformer; the loss is the cross entropy with tgt as probabilities."""
    if len(spec.src_shape) != 2 or len(spec.tgt_shape) != 2 or spec.src_shape[1] != spec.tgt_shape[1]:
        raise RequestError(
            "--model transformer requires samples of shape (length, embedding) with the same embedding size "
            f"for src and tgt; the data has src {spec.src_shape} and tgt {spec.tgt_shape}"
        )
    embedding = spec.src_shape[1]
    if embedding % _HEADS:
        raise RequestError(
            f"--model transformer has {_HEADS} attention heads, which do not divide the embedding size "
            f"{embedding}; the nearest valid size is {max(_HEADS, round(embedding / _HEADS) * _HEADS)}"
        )
    return Task(
        model=nn.Transformer(d_model=embedding, nhead=_HEADS, dropout=dropout, batch_first=True),
        forward=lambda model, src, tgt: model(src, tgt),
        loss=functional.cross_entropy,
        src_indices=False,
        tgt_indices=False,
        tensor_parallel=_feed_forward_plan,
        stages=_transformer_stages,
    )


def _feed_forward_plan(model: nn.Module) -> dict[str, Any]:
    """Returns a plan that splits the feed-forward layers, which contain two thirds of the parameters.

    nn.MultiheadAttention packs q, k and v into one parameter, which cannot be split by heads.
    """
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    layers = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
    plan: dict[str, Any] = {}
    for name, module in model.named_modules():
        if isinstance(module, layers):
            plan[f"{name}.linear1"], plan[f"{name}.linear2"] = ColwiseParallel(), RowwiseParallel()
    return plan


class _Stage(nn.Module):
    """Consecutive layers of a Transformer. Stages pass the pair (source, target) to each other."""

    def __init__(self, parts: Sequence[nn.Module], last: bool) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self._last = last

    def forward(self, src: Tensor, tgt: Tensor) -> Any:
        for part in self.parts:
            if isinstance(part, nn.TransformerDecoderLayer):
                tgt = part(tgt, src)
            elif isinstance(part, _Norm):
                tgt = part(tgt)
            else:
                src = part(src)
        return tgt if self._last else (src, tgt)


class _Norm(nn.Module):
    """The decoder's last norm, applied to the target."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, tgt: Tensor) -> Tensor:
        normed: Tensor = self.norm(tgt)
        return normed


def _transformer_stages(model: nn.Module, num_stages: int) -> list[nn.Module]:
    assert isinstance(model, nn.Transformer)
    encoder, decoder = model.encoder, model.decoder
    parts = [*encoder.layers, encoder.norm, *decoder.layers, _Norm(decoder.norm)]
    return [_Stage(some, last) for some, last in split_evenly(parts, num_stages)]


class Classifier(nn.Module):
    """Two convolutions and two dense layers for images (C, H, W) or (H, W); only the dense layers for
    vectors.
    """

    def __init__(self, shape: tuple[int, ...], num_classes: int, dropout: float) -> None:
        super().__init__()
        if len(shape) == 1:
            self.features: nn.Module = nn.Identity()
            width = shape[0]
        else:
            channels = shape[0] if len(shape) == 3 else 1
            height, across = shape[-2:]
            shrink = 2 if min(height, across) >= 4 else 1
            self.features = nn.Sequential(
                nn.Conv2d(channels, 32, 3, padding=1),
                nn.ReLU(),
                nn.Conv2d(32, 64, 3, padding=1),
                nn.ReLU(),
                nn.MaxPool2d(shrink),
            )
            width = 64 * (height // shrink) * (across // shrink)
        self.with_channel = len(shape) == 2
        self.head = nn.Sequential(
            nn.Flatten(), nn.Linear(width, 128), nn.ReLU(), nn.Dropout(dropout), nn.Linear(128, num_classes)
        )

    def forward(self, images: Tensor) -> Tensor:
        """Returns scores (B, classes) of images (B, C, H, W), (B, H, W) or vectors (B, E)."""
        if self.with_channel:
            images = images.unsqueeze(1)  # (B, 1, H, W)
        scores: Tensor = self.head(self.features(images))
        return scores


def classifier(spec: SampleSpec, dropout: float) -> Task:
    """Returns a task with a small network for images or vectors that have one label each."""
    if spec.num_classes is None or spec.tgt_shape != () or not 1 <= len(spec.src_shape) <= 3:
        raise RequestError(
            "--model classifier requires images (C, H, W), (H, W) or vectors, with one integer label each; "
            f"the data has src {spec.src_shape} and tgt {spec.tgt_shape}"
        )
    return Task(
        model=Classifier(spec.src_shape, spec.num_classes, dropout),
        loss=label_loss,
        num_correct=_num_correct,
        src_indices=False,
        tgt_indices=True,
    )


class _Rows(nn.Module):
    """Flattens each sample to a vector, including scalars, which nn.Flatten does not support."""

    def forward(self, src: Tensor) -> Tensor:
        """Flattens all axes except the first."""
        return _rows(src)


def _rows(values: Tensor) -> Tensor:
    return values.flatten(1) if values.dim() > 1 else values.unsqueeze(1)


def linear(spec: SampleSpec) -> Task:
    """Returns a task with a linear map; the loss is the mean squared error."""
    return Task(
        model=nn.Sequential(_Rows(), nn.Linear(prod(spec.src_shape), prod(spec.tgt_shape))),
        loss=lambda output, tgt: functional.mse_loss(output, _rows(tgt)),
        src_indices=False,
        tgt_indices=False,
    )


def _num_correct(scores: Tensor, labels: Tensor) -> Tensor:
    return (scores.argmax(dim=1) == labels).sum()


TASKS: dict[str, Factory] = {
    "transformer": transformer,
    "classifier": classifier,
    "linear": linear,
    "decoder": decoder,
}


def factory_of(model: str) -> Factory:
    """Returns the factory of a built-in model, or imports that of `--model package.module:factory`.

    Raises:
        RequestError: the module or the factory does not exist, or cannot be imported.
    """
    return TASKS.get(model) or find_named("--model", model)
