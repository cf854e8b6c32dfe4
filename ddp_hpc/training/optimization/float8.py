"""Linear layers whose matrix products are computed in 8-bit floats (`--fp8`), by torchao.

Parameters, gradients and snapshots keep their type: each product scales its inputs to the range of float8
(https://docs.pytorch.org/ao/stable/api_ref_float8.html).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import torch
from torch import nn

from ddp_hpc.base.errors import RequestError
from ddp_hpc.training.optimization.config import OptimizationConfig

# NVIDIA's Ada (8.9), Hopper (9.0) and newer GPUs support matrix products in float8, and so do AMD's MI300,
# MI350 and RDNA 4 (torch/testing/_internal/common_cuda.py of torch 2.13, evaluate_platform_supports_fp8).
_CAPABILITY = (8, 9)
_AMD_ARCHITECTURES = ("gfx94", "gfx95", "gfx120")
# torch._scaled_mm requires that both sizes of a weight are multiples of this number.
_MULTIPLE = 16


def check_fp8(config: OptimizationConfig, device: torch.device) -> None:
    """Raises RequestError if --fp8 cannot be used on this device, with these options or packages."""
    if not config.fp8:
        return
    if device.type != "cuda":
        raise RequestError(f"--fp8 needs a CUDA device, but this rank uses {device}; omit --fp8")
    if not _has_float8(device):
        raise RequestError(
            f"--fp8: {torch.cuda.get_device_name(device)} does not support matrix products in float8 (L40S, "
            "H100, MI300 and newer GPUs do); omit --fp8"
        )
    if config.amp != "bf16":
        raise RequestError(f"--fp8 needs --amp bf16 (got --amp {config.amp}); use --amp bf16, or omit --fp8")
    if importlib.util.find_spec("torchao") is None:
        raise RequestError("--fp8 needs torchao, which is not installed: pip install torchao, or omit --fp8")


def _has_float8(device: torch.device) -> bool:
    if torch.version.hip is None:
        return torch.cuda.get_device_capability(device) >= _CAPABILITY
    # On ROCm, the compute capability is derived from the architecture: an MI250X (gfx90a) has 9.0.
    return str(torch.cuda.get_device_properties(device).gcnArchName).startswith(_AMD_ARCHITECTURES)


def use_fp8(layers: Sequence[nn.Module], *, emulate: bool = False) -> int:
    """Converts the linear layers inside the repeated layers of a model; returns their number.

    The output layer is not converted, because its rounding errors would directly affect the loss. For
    tests, `emulate` computes with rounded values on any device.

    Raises:
        RequestError: no linear layer can be converted.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    def is_converted(module: nn.Module, _: str) -> bool:
        # A subclass may use its weight without calling the layer, as nn.MultiheadAttention does.
        return type(module) is nn.Linear and not any(size % _MULTIPLE for size in module.weight.shape)

    num = sum(is_converted(module, "") for layer in layers for module in layer.modules())
    if not num:
        raise RequestError(
            f"--fp8: no linear layer in the repeated layers of the model has sizes that are multiples of "
            f"{_MULTIPLE}; change the sizes, or omit --fp8"
        )
    for layer in layers:
        convert_to_float8_training(
            layer, module_filter_fn=is_converted, config=Float8LinearConfig(emulate=emulate)
        )
    return num
