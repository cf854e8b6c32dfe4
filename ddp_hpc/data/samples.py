"""The interface between data files and the trainer: shapes, dtypes, and reading samples by number."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ddp_hpc.base.data_file_layout import BFLOAT16
from ddp_hpc.base.user_code_exceptions import message_of

_COLOR = re.compile(r"\x1b\[[0-9;]*m")
# torch.load's message for a file that contains more than tensors. This message is replaced, because it
# recommends weights_only=False, which would run code from the file.
_NOT_LOADED = re.compile(r"weights[_ ]only", re.IGNORECASE)
_NOT_ALLOWED = re.compile(r"[Uu]nsupported (?:global: GLOBAL|class) ([\w.]+)")


@dataclass(frozen=True)
class ArrayInfo:
    """The description of one array in a data file."""

    key: str
    num_samples: int
    shape: tuple[int, ...]
    """Shape of one sample, without the sample axis."""
    dtype: np.dtype[Any]
    """Dtype of the arrays that `read` returns, always in native byte order."""
    bfloat16: bool = False
    """Whether the values are the bits of bfloat16 numbers, stored as uint16 because NumPy has no bfloat16."""

    @property
    def sample_bytes(self) -> int:
        """The size of one sample in bytes."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def dtype_name(self) -> str:
        """The name of the dtype in torch."""
        return BFLOAT16 if self.bfloat16 else self.dtype.name


class Gather(Protocol):
    """A function that reads samples of one array by number, in any order and with repetitions."""

    def __call__(self, indices: NDArray[np.int64], out: NDArray[Any]) -> None:
        """Fills the C-contiguous array `out` of shape (len(indices), ...) in the order of `indices`."""


@dataclass(frozen=True)
class OpenArrays:
    """Both arrays of a file that this process has opened."""

    src: Gather
    tgt: Gather
    check: Callable[[], None]
    """Raises DataError if the file has changed; called before each read."""
    close: Callable[[], None]


@dataclass(eq=False, kw_only=True)
class Samples:
    """The samples of a data file, or of its test split.

    The first `read` in each process opens the file, so an object that was created
    before a fork, or sent to a worker process, uses a separate file handle.
    """

    path: Path
    src: ArrayInfo
    tgt: ArrayInfo
    num_classes: int | None = None
    reader: str
    """How the samples are read, for the log: such as `hdf5 memory map`."""
    open_arrays: Callable[[], OpenArrays]
    test: Samples | None = None
    """The test split, if there is one."""
    _opened: OpenArrays | None = field(default=None, init=False)
    _opened_by: int = field(default=0, init=False)

    @property
    def num_samples(self) -> int:
        """The number of samples, which is the same for src and tgt."""
        return self.src.num_samples

    def read(
        self, indices: NDArray[np.int64], out: tuple[NDArray[Any], NDArray[Any]] | None = None
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """Reads src and tgt, both of shape (len(indices), ...), in the order of `indices`.

        The results are views of the first rows of the two arrays in `out`, which `buffers` creates, or
        new arrays if `out` is None. No other memory of the size of a batch is allocated. `indices` may be
        empty.

        Raises:
            DataError: the file changed since it was opened, or it cannot be read.
            IndexError: an index is not in the range 0 to num_samples - 1.
        """
        num = len(indices)
        # If indices are viewed as unsigned integers, negative ones become the largest, so one pass checks
        # both limits.
        if num and int(indices.view(np.uint64).max()) >= self.num_samples:
            raise IndexError(
                f"indices {indices.min()} to {indices.max()} are not in the range 0 to {self.num_samples - 1}"
            )
        # After a fork, the parent's handle would share its position and its caches with this process.
        if self._opened is None or self._opened_by != os.getpid():
            self._opened, self._opened_by = self.open_arrays(), os.getpid()
        src, tgt = self.buffers(num) if out is None else out
        self._opened.check()
        self._opened.src(indices, src[:num])
        self._opened.tgt(indices, tgt[:num])
        return src[:num], tgt[:num]

    @property
    def sample_bytes(self) -> int:
        """The size in bytes of one sample of src and tgt together."""
        return self.src.sample_bytes + self.tgt.sample_bytes

    def buffers(self, num: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Allocates arrays for `num` samples, which can be passed to `read` repeatedly."""
        return (
            np.empty((num, *self.src.shape), self.src.dtype),
            np.empty((num, *self.tgt.shape), self.tgt.dtype),
        )

    def close(self) -> None:
        """Closes the file; a later `read` reopens it."""
        if self._opened is not None and self._opened_by == os.getpid():
            self._opened.close()
        self._opened = None
        if self.test is not None:
            self.test.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}


def first_line(error: BaseException) -> str:
    """Returns the first line of the error's message, since the messages of some libraries are long."""
    text = message_of(error)
    if _NOT_LOADED.search(text):
        kind = _NOT_ALLOWED.search(text)
        return (
            f"it contains {kind[1]}, but only tensors and plain values are loaded: other types can run code"
            if kind
            else "it contains more than tensors and plain values, or its bytes are damaged"
        )
    lines = text.splitlines()
    # Some libraries color their messages.
    line = _COLOR.sub("", lines[0]) if lines else ""
    line = "".join(char for char in line if char.isprintable()).strip()
    return line or type(error).__name__
