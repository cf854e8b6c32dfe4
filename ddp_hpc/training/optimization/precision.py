"""Runs a step in the data type of the parameters, or in mixed precision (torch.amp)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ddp_hpc.base.errors import RequestError
from ddp_hpc.base.option_names import named
from ddp_hpc.training.optimization.config import OptimizationConfig

AMP_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """Mixed precision (`--amp`). fp16 scales the loss up, so that small gradients do not become zero."""

    def __init__(self, amp: str, device: torch.device) -> None:
        self.amp = amp
        self._device = device
        self.scaler = torch.amp.GradScaler(device.type) if amp == "fp16" else None

    def autocast(self) -> AbstractContextManager[Any]:
        """Returns a context in which matrix products use the half-precision type, and sums use float32."""
        if self.amp == "off":
            return nullcontext()
        return torch.autocast(self._device.type, dtype=AMP_DTYPES[self.amp])

    def cast(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a function so that it always runs under `autocast`."""
        return function if self.amp == "off" else self.autocast()(function)  # type: ignore[operator]  # autocast is also a decorator

    def backward(self, loss: Tensor) -> None:
        """Computes the gradients of the loss, scaled for fp16."""
        loss = self.scaler.scale(loss) if self.scaler is not None else loss
        loss.backward()  # type: ignore[no-untyped-call]

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Removes the scaling of the gradients, so that they can be checked or clipped before the update."""
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Updates the parameters. With fp16, skips the update and lowers the scale if gradients overflow."""
        if self.scaler is None:
            optimizer.step()
        else:
            self.scaler.step(optimizer)
            self.scaler.update()


def check_bf16(config: OptimizationConfig, device: torch.device) -> None:
    """Raises RequestError if the options require bfloat16, but the GPU cannot compute in it.

    By default, is_bf16_supported is also true for GPUs that only emulate bfloat16, such as a V100.
    """
    if config.amp != "bf16" or device.type != "cuda":
        return
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        raise RequestError(
            f"{named('amp')} bf16: {torch.cuda.get_device_name(device)} does not support bfloat16 (A100 and "
            f"newer GPUs do); use {named('amp')} fp16"
        )


def set_matmul_precision(level: str | None, device: torch.device) -> str:
    """Sets the precision of float32 matrix products; returns a line for the log.

    None keeps torch's defaults: `highest` for matrix products, but TF32 for cuDNN's convolutions;
    https://docs.pytorch.org/docs/stable/notes/cuda.html (TensorFloat-32).
    """
    if level is None:
        torchs = "float32 matrix products in float32, cuDNN's convolutions in TF32 (torch's defaults)"
        return f"{torchs}; --matmul-precision sets both" if device.type == "cuda" else ""
    torch.set_float32_matmul_precision(level)
    if device.type != "cuda":
        return ""
    torch.backends.cudnn.allow_tf32 = level != "highest"
    how = {"highest": "in float32, no TF32", "high": "in TF32", "medium": "in bfloat16"}[level]
    return f"float32 matrix products {how} (--matmul-precision {level})"
