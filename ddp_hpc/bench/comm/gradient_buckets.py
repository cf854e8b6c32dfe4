"""The gradient buckets that DistributedDataParallel creates for a model."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

# torch re-exports these without naming them in an __all__.
from torch.distributed import (  # type: ignore[attr-defined]
    _DEFAULT_FIRST_BUCKET_BYTES,
    _compute_bucket_assignment_by_size,
)

from ddp_hpc.base.errors import RequestError
from ddp_hpc.data.open_file import open_samples
from ddp_hpc.training.config import TrainConfig
from ddp_hpc.training.tasks.builtin_models import factory_of
from ddp_hpc.training.tasks.task import SampleSpec, make_task

_DEFAULT_CAP_MIB = 25.0


@dataclass(frozen=True)
class Bucket:
    """The gradients that are reduced by one all_reduce."""

    num_elements: int
    dtype: str  # such as float32


def buckets_of(model: nn.Module, cap_mib: float | None) -> list[Bucket]:
    """Returns the buckets of DDP in the order in which the backward pass fills them.

    From its second step on, DDP orders parameters by when their gradients became ready. Here they are in
    reverse model order, so a bias may be in another bucket than in a real run.

    Args:
        model: the model with all its parameters, on any device.
        cap_mib: DDP's `bucket_cap_mb`. None is its default: 25 MiB, with a first bucket of 1 MiB, which DDP
            does not create if a cap is given (torch/nn/parallel/distributed.py).
    """
    parameters: list[Tensor] = [p for p in reversed(list(model.parameters())) if p.requires_grad]
    cap_bytes = int((cap_mib or _DEFAULT_CAP_MIB) * 2**20)
    first_bytes = cap_bytes if cap_mib else _DEFAULT_FIRST_BUCKET_BYTES
    indices, _ = _compute_bucket_assignment_by_size(parameters, [first_bytes, cap_bytes])
    return [
        Bucket(
            sum(parameters[i].numel() for i in bucket),
            str(parameters[bucket[0]].dtype).removeprefix("torch."),
        )
        for bucket in indices
    ]


def make_model(**options: Any) -> nn.Module:
    """Creates the model of `--buckets-of` in the same way as `python -m ddp_hpc.train --model`.

    Args:
        options: `model`, `model_options`, `data`, `src_shape` and `tgt_shape` of a TrainConfig.

    Raises:
        RequestError: there is no such model, it requires `--data`, or its factory failed.
    """
    try:
        config = TrainConfig.of(**options)
        if str(Path.cwd()) not in sys.path:
            # `python -m` adds this directory, but the script `ddp-hpc` does not.
            sys.path.insert(0, str(Path.cwd()))
        spec = None
        if config.data.path is not None:
            samples = open_samples(config.data.path)
            spec = SampleSpec.of(samples)
            samples.close()
        elif not config.model.is_own or config.data.src_shape is not None:
            spec = SampleSpec(*config.synthetic_shapes, num_classes=None)
        with torch.device("cpu"):
            return make_task(
                config.model.name,
                factory_of(config.model.name),
                spec,
                config.model.dropout,
                dict(config.model.options),
                config.seed,
            ).model
    except RequestError as error:
        raise RequestError(str(error).replace("--model ", "--buckets-of ")) from None
