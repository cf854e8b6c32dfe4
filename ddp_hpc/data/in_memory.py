"""Samples that a program brings itself: two arrays, or a dataset that gives a pair for a number. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddp_hpc.data.samples import OpenArrays, Samples, check_array, check_pair, first_line
from ddp_hpc.errors import DataError

# What stands for the path in errors.
_NAME = Path("the dataset")


def samples_of_arrays(src: Any, tgt: Any, *, num_classes: int | None = None) -> Samples:
    """The samples of two arrays or CPU tensors (samples, ...), which are not copied.

    Raises:
        DataError: they have different lengths, no samples, or no numbers.
    """
    arrays = [_as_array(name, values) for name, values in (("src", src), ("tgt", tgt))]

    src_array, tgt_array = arrays
    opened = OpenArrays(_Take(src_array), _Take(tgt_array), check=_nothing, close=_nothing)
    return _samples([(a.shape, a.dtype) for a in arrays], opened, num_classes, "memory")


def samples_of_dataset(dataset: Any, *, num_classes: int | None = None) -> Samples:
    """The samples of an object with `len(dataset)` and `dataset[i]`, a pair (src, tgt) of numbers or arrays.

    Raises:
        DataError: it has no length, no samples, or gives something else; also while reading.
    """
    try:
        num = len(dataset)
    except TypeError:
        raise DataError(
            f"the dataset is a {type(dataset).__name__} without a length; "
            "one with `len(dataset)` and `dataset[i]` is needed"
        ) from None
    if not num:
        raise DataError("the dataset has no samples; at least one is needed")
    first = _pair(dataset, 0)
    kept: list[list[NDArray[Any]]] = []

    def read_src(indices: NDArray[np.int64], out: NDArray[Any]) -> None:
        targets = []
        for place, number in enumerate(indices.tolist()):
            src, tgt = _pair(dataset, number)
            if (src.shape, tgt.shape) != (first[0].shape, first[1].shape):
                raise DataError(
                    f"the dataset's sample {number} has shapes {src.shape} and {tgt.shape}, sample 0 has "
                    f"{first[0].shape} and {first[1].shape}: all have to be alike"
                )
            for values, needed in zip((src, tgt), first, strict=True):
                if not np.can_cast(values.dtype, needed.dtype, "same_kind"):  # 0, then 0.5: it would be 0 too
                    raise DataError(
                        f"the dataset's sample {number} has {values.dtype} where sample 0 has "
                        f"{needed.dtype}: all have to be alike"
                    )
            out[place] = src
            targets.append(tgt)
        kept[:] = [targets]  # each sample is asked for once

    def read_tgt(indices: NDArray[np.int64], out: NDArray[Any]) -> None:
        del indices  # those that src was just read for
        for place, tgt in enumerate(kept.pop()):
            out[place] = tgt

    opened = OpenArrays(read_src, read_tgt, check=_nothing, close=_nothing)
    return _samples([((num, *a.shape), a.dtype) for a in first], opened, num_classes, "dataset")


def check_workers(workers: int) -> None:
    """Raises DataError for any: they are other processes, which read files."""
    if workers:
        raise DataError(
            f"{workers} workers read files, and this data is in the memory of the rank: a thread reads it; "
            "leave workers out, or put the data into a file"
        )


def _samples(
    abouts: list[tuple[tuple[int, ...], np.dtype[Any]]],
    opened: OpenArrays,
    num_classes: int | None,
    reader: str,
) -> Samples:
    src, tgt = (
        check_array(_NAME, key, shape, dtype)
        for key, (shape, dtype) in zip(("src", "tgt"), abouts, strict=True)
    )
    check_pair(_NAME, src, tgt)
    return Samples(_NAME, src, tgt, num_classes=num_classes, reader=reader, open_arrays=lambda: opened)


class _Take:
    """An array, read by numbers."""

    def __init__(self, array: NDArray[Any]) -> None:
        self._array = array

    def __call__(self, indices: NDArray[np.int64], out: NDArray[Any]) -> None:
        # With mode "raise" NumPy fills a buffer of its own first; the numbers are checked before.
        np.take(self._array, indices, axis=0, out=out, mode="wrap")


def _pair(dataset: Any, number: int) -> tuple[NDArray[Any], NDArray[Any]]:
    try:
        src, tgt = dataset[number]
        return _as_array("src", src), _as_array("tgt", tgt)
    except DataError:
        raise
    except Exception as error:  # the user's code may raise anything
        raise DataError(
            f"the dataset's sample {number} is no pair (src, tgt) of arrays: "
            f"{type(error).__name__}: {first_line(error)}"
        ) from None


def _as_array(name: str, values: Any) -> NDArray[Any]:
    try:
        return np.asarray(values)
    except Exception as error:  # of a tensor on a device, or of another library
        raise DataError(
            f"{name} is a {type(values).__name__}, which NumPy cannot read: {first_line(error)}"
        ) from None


def _nothing() -> None:
    pass
