"""An open data file as the trainer sees it: shapes, dtypes, and samples by number."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ddp_hpc.errors import DataError
from ddp_hpc.h5_layout import BFLOAT16

# What torch.from_numpy takes and a model can use: bool, integers and floats of up to 8 bytes.
_KINDS = "biuf"
_MAX_ITEM_BYTES = 8
_MAX_LISTED = 12
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class ArrayInfo:
    """One array of a file."""

    key: str
    num_samples: int
    shape: tuple[int, ...]
    """Of one sample, without the axis of samples."""
    dtype: np.dtype[Any]
    """Of what `read` returns: native byte order, whatever the file has."""
    bfloat16: bool = False
    """NumPy lacks the type: `dtype` is uint16 then, and each value the bits of a bfloat16."""

    @property
    def sample_bytes(self) -> int:
        """Bytes of one sample of it."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def dtype_name(self) -> str:
        """What torch calls the type."""
        return BFLOAT16 if self.bfloat16 else self.dtype.name


class Gather(Protocol):
    """An array of an open file from which samples are taken by number, each number at any place."""

    def __call__(self, indices: NDArray[np.int64], out: NDArray[Any]) -> None:
        """Fills `out` (len(indices), ...), C-contiguous, in the order of `indices`."""


@dataclass(frozen=True)
class OpenArrays:
    """Both arrays of a file that this process has open."""

    src: Gather
    tgt: Gather
    check: Callable[[], None]
    """Raises DataError if the file is not what it was; called before each read."""
    close: Callable[[], None]


class Samples:
    """The samples of a data file, or of its test split.

    The file is opened by the first `read` of each process, so an object made
    before a fork, or sent to a worker, reads through a handle of its own.
    """

    def __init__(
        self,
        path: Path,
        src: ArrayInfo,
        tgt: ArrayInfo,
        *,
        num_classes: int | None,
        reader: str,
        open_arrays: Callable[[], OpenArrays],
        test: Samples | None = None,
        other_files: bool = False,
        advice: str = "",
    ) -> None:
        self.path = path
        self.src, self.tgt = src, tgt
        self.num_samples = src.num_samples
        self.src_shape, self.tgt_shape = src.shape, tgt.shape
        self.src_dtype, self.tgt_dtype = src.dtype, tgt.dtype
        self.src_bfloat16, self.tgt_bfloat16 = src.bfloat16, tgt.bfloat16
        self.num_classes = num_classes
        self.reader = reader
        self.test = test
        self.other_files = other_files
        """Some of the data lies in other files: a copy of this one alone is not the data."""
        self.advice = advice
        """What would make reading faster, for the user; empty where nothing does."""
        self._open_arrays = open_arrays
        self._opened: OpenArrays | None = None
        self._opened_by = 0

    def read(
        self, indices: NDArray[np.int64], out: tuple[NDArray[Any], NDArray[Any]] | None = None
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """Arrays src and tgt, both (len(indices), ...), in the order of `indices`, which may be empty.

        They are the beginnings of the two arrays `out`, as `buffers` makes them, or
        new ones without it. Nothing else of the batch's size is allocated.

        Raises:
            DataError: the file changed since it was opened, or it cannot be read.
            IndexError: for an index outside 0 to num_samples - 1.
        """
        num = len(indices)
        # One pass for both ends: as unsigned numbers, negative ones are the largest.
        if num and int(indices.view(np.uint64).max()) >= self.num_samples:
            raise IndexError(f"indices {indices.min()} to {indices.max()} of {self.num_samples} samples")
        # A handle that a fork copied shares its position and its caches with the parent's.
        if self._opened is None or self._opened_by != os.getpid():
            self._opened, self._opened_by = self._open_arrays(), os.getpid()
        src, tgt = self.buffers(num) if out is None else out
        self._opened.check()
        self._opened.src(indices, src[:num])
        self._opened.tgt(indices, tgt[:num])
        return src[:num], tgt[:num]

    @property
    def sample_bytes(self) -> int:
        """Bytes of one sample of src and of tgt together."""
        return self.src.sample_bytes + self.tgt.sample_bytes

    def buffers(self, num: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Room for `num` samples, to be handed to `read` again and again."""
        return (
            np.empty((num, *self.src.shape), self.src.dtype),
            np.empty((num, *self.tgt.shape), self.tgt.dtype),
        )

    def close(self) -> None:
        """Let go of the file; a later `read` opens it again."""
        if self._opened is not None and self._opened_by == os.getpid():
            self._opened.close()
        self._opened = None
        if self.test is not None:
            self.test.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}


def check_array(
    path: Path, key: str, shape: tuple[int, ...] | None, dtype: np.dtype[Any], bfloat16: bool = False
) -> ArrayInfo:
    """The array as the trainer can use it.

    Raises:
        DataError: no axis of samples, no samples, empty samples, or values that are no numbers.
    """
    if not shape:
        raise DataError(
            f"{path}: {key} is {'empty' if shape is None else 'a single value'}; "
            "an array whose first axis is the samples is needed"
        )
    if shape[0] == 0:
        raise DataError(
            f"{path}: {key} has shape {shape}, no samples; write the file again with at least one"
        )
    if 0 in shape:
        raise DataError(
            f"{path}: {key} has shape {shape}, samples without values; write it with sizes above 0"
        )
    if dtype.kind not in _KINDS or dtype.itemsize > _MAX_ITEM_BYTES:
        raise DataError(
            f"{path}: {key} has dtype {str(dtype)[:100]}; "
            "numbers that torch has are needed, such as float32 or int64"
        )
    return ArrayInfo(key, shape[0], tuple(shape[1:]), dtype.newbyteorder("="), bfloat16)


def check_pair(path: Path, src: ArrayInfo, tgt: ArrayInfo) -> None:
    """Raises DataError unless both arrays have as many samples."""
    if src.num_samples != tgt.num_samples:
        raise DataError(
            f"{path}: {src.key} has {src.num_samples} samples and {tgt.key} has {tgt.num_samples}; "
            "each sample needs both, write the file again"
        )


def check_test(path: Path, train: tuple[ArrayInfo, ArrayInfo], test: tuple[ArrayInfo, ArrayInfo]) -> None:
    """Raises DataError unless the test split's samples look like the others."""
    for ours, theirs in zip(train, test, strict=True):
        if (ours.shape, ours.dtype_name) != (theirs.shape, theirs.dtype_name):
            raise DataError(
                f"{path}: {theirs.key} has samples {theirs.shape} {theirs.dtype_name} and {ours.key} has "
                f"{ours.shape} {ours.dtype_name}; both splits need the same, write the file again"
            )


def first_line(error: BaseException) -> str:
    """The error's first line, for libraries that explain themselves at length."""
    # The text of a KeyError is the repr of its text.
    lines = str(error.args[0] if isinstance(error, KeyError) and error.args else error).splitlines()
    # Some colour their words.
    line = _COLOUR.sub("", lines[0]) if lines else ""
    line = "".join(char for char in line if char.isprintable()).strip()
    return line or type(error).__name__


def listing(names: Sequence[str]) -> str:
    """The names for an error, the first dozen of many; empty for none."""
    return ", ".join(names[:_MAX_LISTED]) + (", ..." if len(names) > _MAX_LISTED else "")
