"""The gradients of a model as DistributedDataParallel sends them."""

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

from ddp_hpc.data.formats import open_samples
from ddp_hpc.errors import RequestError
from ddp_hpc.training.config import TrainConfig
from ddp_hpc.training.models import TASKS
from ddp_hpc.training.task import SampleSpec, find_factory, make_task

_DEFAULT_CAP_MIB = 25.0


@dataclass(frozen=True)
class Bucket:
    """Gradients that one all_reduce adds up."""

    num_elements: int
    dtype: str  # such as float32


def buckets_of(model: nn.Module, cap_mib: float | None) -> list[Bucket]:
    """The buckets of DDP's steps, in the order in which the backward pass fills them.

    From its second step on DDP lays parameters out in the order in which their gradients came; here that is
    the reverse of their order in the model, so a bias may lie one bucket further than in a real run.

    Args:
        model: with all its parameters, on any device.
        cap_mib: DDP's `bucket_cap_mb`. None is its default: 25, and a first bucket of 1 MiB, which
            DDP leaves out where a cap is given (torch/nn/parallel/distributed.py).
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
    """The model of `--buckets-of`, as `python -m ddp_hpc.train --model` makes it.

    Args:
        options: `model`, `model_options`, `data`, `src_shape` and `tgt_shape` of a TrainConfig.

    Raises:
        RequestError: there is no such model, it needs `--data`, or its factory fails.
    """
    try:
        config = TrainConfig(**options)
        if str(Path.cwd()) not in sys.path:
            sys.path.insert(0, str(Path.cwd()))  # as `python -m` has it, and the script `ddp-hpc` has not
        factory = find_factory(config.model) if config.is_own_model else TASKS[config.model]
        spec = None
        if config.data is not None:
            samples = open_samples(config.data)
            spec = SampleSpec.of(samples)
            samples.close()
        elif not config.is_own_model or config.src_shape is not None:
            spec = SampleSpec(*config.synthetic_shapes, num_classes=None)
        with torch.device("cpu"):
            return make_task(
                config.model, factory, spec, config.dropout, dict(config.model_options), config.seed
            ).model
    except RequestError as error:
        raise RequestError(str(error).replace("--model ", "--buckets-of ")) from None
