"""Runs a training on a CPU whose optimizer uses torch's foreach functions, as on a GPU without --fused."""

from functools import partial
from typing import Any
from unittest import mock

import torch

from ddp_hpc import train
from ddp_hpc.training.optimization.config import OptimizationConfig
from ddp_hpc.training.optimization.optimizers import optimizer_options
from ddp_hpc.training.parallel import base, ddp

GPU = torch.device("xpu")  # for which foreach is the default


def main(argv: list[str]) -> None:
    def options(config: OptimizationConfig, device: torch.device, lr: float, **more: Any) -> dict[str, Any]:
        found = optimizer_options(config, GPU, lr, **more)
        assert found["foreach"]
        return found

    replace = partial(mock.patch.object, attribute="optimizer_options", new=options)
    with replace(base), replace(ddp):
        train.main(argv)
