"""Counts the floating-point operations per sample, and looks up the peak FLOP/s of the device."""

from __future__ import annotations

import copy

import torch

from ddp_hpc.data.samples import Samples
from ddp_hpc.training.tasks.task import Task, zeros

# Peak rates in dense TFLOP/s for (float32, TF32, bf16 and fp16), by the beginning of torch's device name; the
# longest match counts. From the vendors' data sheets: nvidia.com/en-us/data-center/{v100,a100,a40,h100,h200}
# and amd.com/en/products/accelerators (an MI250X has two dies, each with one rank). Checked 2026-11.
_PEAKS: dict[str, tuple[float, float, float]] = {
    "Tesla V100": (15.7, 15.7, 125.0),
    "NVIDIA A100": (19.5, 156.0, 312.0),
    "NVIDIA A40": (37.4, 74.8, 149.7),
    "NVIDIA H100": (67.0, 494.7, 989.4),
    "NVIDIA H100 PCIe": (51.0, 378.0, 756.0),
    "NVIDIA H200": (67.0, 494.7, 989.4),
    "NVIDIA GH200": (67.0, 494.7, 989.4),
    "AMD Instinct MI250X": (23.9, 23.9, 191.5),
}


def flops_per_sample(task: Task, samples: Samples, dtype: torch.dtype) -> float:
    """Returns the FLOPs per sample of a forward and backward pass; 0 if they cannot be counted.

    torch counts matrix products, convolutions and attention on fake tensors, so nothing is computed.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    num = 2  # more than one sample, as batch norms require
    try:
        # torch 2.13 does not count its fused attention for CPUs.
        with (
            FakeTensorMode(allow_non_fake_inputs=True),
            sdpa_kernel(SDPBackend.MATH),
            FlopCounterMode(display=False) as counter,
        ):
            model = copy.deepcopy(task.model)
            src, tgt = zeros(task, samples, dtype, torch.device("cpu"), num)
            task.loss(task.forward(model, src, tgt), tgt).backward()  # type: ignore[no-untyped-call]
    except Exception:  # a model can depend on values, which fake tensors do not have
        return 0.0
    return float(counter.get_total_flops()) / num


def peak_flops_per_s(device: torch.device, half_dtype: str | None, matmul_precision: str | None) -> float:
    """Returns the peak FLOP/s of the device in these data types; 0 if unknown, as for CPUs."""
    if device.type != "cuda":
        return 0.0
    name = torch.cuda.get_device_name(device)
    known = [prefix for prefix in _PEAKS if name.startswith(prefix)]
    if not known:
        return 0.0
    float32, tf32, half = _PEAKS[max(known, key=len)]
    peak = half if half_dtype is not None else float32 if matmul_precision in (None, "highest") else tf32
    return peak * 1e12
