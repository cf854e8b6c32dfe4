"""Finds the first sample that contains a NaN or an infinity, in bounded memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddp_hpc.data.samples import ArrayInfo, Samples

_BLOCK_BYTES = 16 * 1024 * 1024
# A bfloat16 with all exponent bits set is not finite: a NaN if any fraction bit is set, otherwise an
# infinity.
_EXPONENT, _FRACTION = np.uint16(0x7F80), np.uint16(0x007F)


@dataclass(frozen=True)
class BadSample:
    """A sample that contains a non-finite value."""

    number: int
    key: str
    kind: str
    """The kind of the first non-finite value: `a NaN` or `an infinity`."""


def first_bad_sample(samples: Samples, start: int, stop: int) -> BadSample | None:
    """Returns the first sample in [start, stop) with a NaN or an infinity in src or tgt, or None.

    Integers are always finite: if both src and tgt are integers, nothing is read.

    Raises:
        DataError: the file cannot be read, or it changed while it was read.
    """
    arrays = (samples.src, samples.tgt)
    if not any(map(_is_float, arrays)):
        return None
    samples_per_block = max(1, min(_BLOCK_BYTES // samples.sample_bytes, stop - start))
    buffers = samples.buffers(samples_per_block)
    for first in range(start, stop, samples_per_block):
        numbers = np.arange(first, min(first + samples_per_block, stop), dtype=np.int64)
        bad_samples = [
            BadSample(first + bad[0], array.key, bad[1])
            for array, values in zip(arrays, samples.read(numbers, buffers), strict=True)
            if _is_float(array) and (bad := _first_bad(values, array.bfloat16)) is not None
        ]
        if bad_samples:
            return min(bad_samples, key=lambda bad: bad.number)
    return None


def _is_float(array: ArrayInfo) -> bool:
    return array.bfloat16 or array.dtype.kind == "f"


def _first_bad(values: NDArray[Any], bfloat16: bool) -> tuple[int, str] | None:
    """Returns the row and kind of the first non-finite value in memory order, or None."""
    finite = (values & _EXPONENT) != _EXPONENT if bfloat16 else np.isfinite(values)
    if finite.all():
        return None
    index = np.unravel_index(int(finite.argmin()), values.shape)
    is_nan = values[index] & _FRACTION != 0 if bfloat16 else np.isnan(values[index])
    return int(index[0]), "a NaN" if is_nan else "an infinity"
