"""Converts between float32 and bfloat16, which is stored as uint16 because NumPy has no bfloat16."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_NAN = np.uint16(0x7FC0)


def to_bfloat16(values: NDArray[Any]) -> NDArray[np.uint16]:
    """Rounds to the nearest bfloat16 as torch does: ties to even, and too large values to infinity."""
    values = values.astype(np.float32, copy=False)
    bits = values.view(np.uint32)
    rounded: NDArray[np.uint16] = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    # A NaN's bits could round up to infinity.
    if (is_nan := np.isnan(values)).any():
        rounded[is_nan] = _NAN
    return rounded


def from_bfloat16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Converts bfloat16 bits to float32 without loss."""
    return (bits.astype(np.uint32) << 16).view(np.float32)
