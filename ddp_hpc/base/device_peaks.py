"""The peak FLOP/s of devices, by the names that torch gives them."""

from __future__ import annotations

from typing import NamedTuple


class Peaks(NamedTuple):
    """Dense peak rates of a device, in TFLOP/s."""

    float32: float
    tf32: float
    half: float
    """In bfloat16 and float16."""


# By the beginning of the name. From the vendors' data sheets:
# nvidia.com/en-us/data-center/{v100,a100,a40,h100,h200}, and amd.com/en/products/accelerators (an MI250X has
# two dies, each with one rank). Rates of Tensor or matrix cores where they have them. Checked 2026-11.
_PEAKS = {
    "Tesla V100": Peaks(15.7, 15.7, 125.0),
    "NVIDIA A100": Peaks(19.5, 156.0, 312.0),
    "NVIDIA A40": Peaks(37.4, 74.8, 149.7),
    "NVIDIA H100": Peaks(67.0, 494.7, 989.4),
    "NVIDIA H100 PCIe": Peaks(51.0, 378.0, 756.0),
    "NVIDIA H200": Peaks(67.0, 494.7, 989.4),
    "NVIDIA GH200": Peaks(67.0, 494.7, 989.4),
    "AMD Instinct MI250X": Peaks(47.9, 47.9, 191.5),
    "AMD Instinct MI300X": Peaks(163.4, 653.7, 1307.4),
}


def peaks_of(device_name: str) -> Peaks | None:
    """Returns the peak rates of a device; None if they are unknown."""
    known = [prefix for prefix in _PEAKS if device_name.startswith(prefix)]
    return _PEAKS[max(known, key=len)] if known else None
