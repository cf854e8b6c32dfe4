"""Counts the floating-point operations per sample, and looks up the peak FLOP/s of the device."""

from __future__ import annotations

import copy

import torch

from ddp_hpc.base.device_peaks import peaks_of
from ddp_hpc.data.samples import Samples
from ddp_hpc.training.tasks.task import Task, zeros


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
    peaks = peaks_of(torch.cuda.get_device_name(device))
    if peaks is None:
        return 0.0
    of_float = peaks.float32 if matmul_precision in (None, "highest") else peaks.tf32
    return (of_float if half_dtype is None else peaks.half) * 1e12
