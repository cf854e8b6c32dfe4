"""bfloat16, which NumPy lacks, as uint16: the upper halves of float32."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_NAN, _INFINITY, _WITHOUT_SIGN = np.uint16(0x7FC0), np.uint16(0x7F80), np.uint16(0x7FFF)


def to_bfloat16(values: NDArray[Any]) -> NDArray[np.uint16]:
    """The bits of the nearest bfloat16, as in torch: halves to even; what is too large becomes infinite."""
    values = values.astype(np.float32, copy=False)
    bits = values.view(np.uint32)
    rounded: NDArray[np.uint16] = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    # A NaN's bits could round up to infinity.
    if (is_nan := np.isnan(values)).any():
        rounded[is_nan] = _NAN
    return rounded


def from_bfloat16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """The float32 of the same values."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def num_infinite(bits: NDArray[np.uint16]) -> int:
    """How many of the bfloat16 are infinite."""
    return int(np.count_nonzero((bits & _WITHOUT_SIGN) == _INFINITY))
