"""Whether samples hold numbers: the first one with a NaN or an infinity, found in bounded memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddp_hpc.data.samples import ArrayInfo, Samples

_BLOCK_BYTES = 16 * 1024 * 1024
# Of a bfloat16: all exponent bits set means no finite number, and then any bit of the fraction a NaN.
_EXPONENT, _FRACTION = np.uint16(0x7F80), np.uint16(0x007F)


@dataclass(frozen=True)
class BadSample:
    """A sample that is not all finite numbers."""

    number: int
    key: str
    kind: str
    """`a NaN` or `an infinity`."""


def first_bad_sample(samples: Samples, start: int, stop: int) -> BadSample | None:
    """The first sample from `start` up to `stop` with a NaN or an infinity in src or tgt; None without.

    Integers are always finite: where src and tgt both are, nothing is read.

    Raises:
        DataError: the file cannot be read, or changed meanwhile.
    """
    arrays = (samples.src, samples.tgt)
    if not any(_is_float(array) for array in arrays):
        return None
    num_a_block = max(1, min(_BLOCK_BYTES // samples.sample_bytes, stop - start))
    buffers = samples.buffers(num_a_block)
    for first in range(start, stop, num_a_block):
        numbers = np.arange(first, min(first + num_a_block, stop), dtype=np.int64)
        found = [
            BadSample(first + bad[0], array.key, bad[1])
            for array, values in zip(arrays, samples.read(numbers, buffers), strict=True)
            if _is_float(array) and (bad := _first_bad(values, array.bfloat16)) is not None
        ]
        if found:
            return min(found, key=lambda bad: bad.number)
    return None


def _is_float(array: ArrayInfo) -> bool:
    return array.bfloat16 or array.dtype.kind == "f"


def _first_bad(values: NDArray[Any], bfloat16: bool) -> tuple[int, str] | None:
    """Row and kind of the first value in memory that is not finite."""
    finite = (values & _EXPONENT) != _EXPONENT if bfloat16 else np.isfinite(values)
    if finite.all():
        return None
    place = np.unravel_index(int(finite.argmin()), values.shape)
    is_nan = values[place] & _FRACTION != 0 if bfloat16 else np.isnan(values[place])
    return int(place[0]), "a NaN" if is_nan else "an infinity"
