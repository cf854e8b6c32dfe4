"""Samples from a program's memory: two arrays, or a map-style dataset of pairs. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddp_hpc.base.errors import DataError
from ddp_hpc.base.user_code_exceptions import describe_error, traceback_of
from ddp_hpc.data.file_arrays import check_array, check_pair
from ddp_hpc.data.memory_mapped import gather_from
from ddp_hpc.data.samples import Gather, OpenArrays, Samples, first_line

# Used in place of a path in error messages.
_DATASET = Path("the dataset")


def samples_of_arrays(src: Any, tgt: Any, name: Path = _DATASET) -> Samples:
    """Wraps two arrays or CPU tensors of shape (samples, ...) without copying them. Errors begin with `name`.

    Raises:
        DataError: the lengths differ, there are no samples, or the values are not numeric.
    """
    arrays = _as_array("src", src), _as_array("tgt", tgt)
    shapes = [(array.shape, array.dtype) for array in arrays]
    return _samples(shapes, gather_from(arrays[0]), gather_from(arrays[1]), "memory", name)


def samples_of_dataset(dataset: Any) -> Samples:
    """Wraps a map-style dataset, in which `dataset[i]` is a pair (src, tgt) of numbers or arrays.

    Raises:
        DataError: it has no length or no samples, or an item is not such a pair. Also raised while reading.
    """
    try:
        num = len(dataset)
    except TypeError:
        raise DataError(
            f"the dataset ({type(dataset).__name__}) has no length; "
            "a map-style dataset with __len__ and __getitem__ is required"
        ) from None
    if not num:
        raise DataError("the dataset has no samples; at least one is required")
    first = _pair(dataset, 0)
    kept: list[list[NDArray[Any]]] = []

    def read_src(indices: NDArray[np.int64], out: NDArray[Any]) -> None:
        targets = []
        for row, number in enumerate(indices.tolist()):
            src, tgt = _pair(dataset, number)
            if (src.shape, tgt.shape) != (first[0].shape, first[1].shape):
                raise DataError(
                    f"dataset[{number}] has shapes {src.shape} and {tgt.shape}, but dataset[0] has "
                    f"{first[0].shape} and {first[1].shape}; all samples must have the same shapes"
                )
            for values, expected in zip((src, tgt), first, strict=True):
                # If sample 0 is the integer 0, a later 0.5 would be truncated to 0.
                if not np.can_cast(values.dtype, expected.dtype, "same_kind"):
                    raise DataError(
                        f"dataset[{number}] has dtype {values.dtype}, but dataset[0] has "
                        f"{expected.dtype}; all samples must have the same dtypes"
                    )
            out[row] = src
            targets.append(tgt)
        kept[:] = [targets]  # keep them, so that dataset[number] is called only once per sample

    def read_tgt(indices: NDArray[np.int64], out: NDArray[Any]) -> None:
        del indices  # the samples are the same as in the preceding call of read_src
        for row, tgt in enumerate(kept.pop()):
            out[row] = tgt

    shapes = [((num, *array.shape), array.dtype) for array in first]
    return _samples(shapes, read_src, read_tgt, "dataset")


def check_workers(workers: int) -> None:
    """Raises DataError if `workers` is not 0, since worker processes can read only files."""
    if workers:
        raise DataError(
            f"workers is {workers}, but worker processes cannot read data in the memory of the rank; "
            "omit workers, or write the data to a file"
        )


def _samples(
    shapes: list[tuple[tuple[int, ...], np.dtype[Any]]],
    read_src: Gather,
    read_tgt: Gather,
    reader: str,
    name: Path = _DATASET,
) -> Samples:
    src, tgt = (check_array(name, key, *shape) for key, shape in zip(("src", "tgt"), shapes, strict=True))
    check_pair(name, src, tgt)
    opened = OpenArrays(read_src, read_tgt, check=lambda: None, close=lambda: None)
    return Samples(path=name, src=src, tgt=tgt, reader=reader, open_arrays=lambda: opened)


def _pair(dataset: Any, number: int) -> tuple[NDArray[Any], NDArray[Any]]:
    try:
        sample = dataset[number]
    except Exception as error:  # the user's code may raise any exception
        problem = DataError(f"dataset[{number}] raised {describe_error(error)}")
        problem.traceback_text = traceback_of(error)
        raise problem from None
    if not isinstance(sample, tuple | list) or len(sample) != 2:
        size = f" with {len(sample)} values" if isinstance(sample, tuple | list | Mapping) else ""
        raise DataError(
            f"dataset[{number}] returned a {type(sample).__name__}{size}; a pair (src, tgt) of arrays is "
            "required"
        )
    return _as_array("src", sample[0]), _as_array("tgt", sample[1])


def _as_array(name: str, values: Any) -> NDArray[Any]:
    try:
        return np.asarray(values)
    except Exception as error:  # raised, for example, for a tensor on a GPU
        raise DataError(
            f"NumPy cannot convert {name} ({type(values).__name__}) to an array: {first_line(error)}"
        ) from None
