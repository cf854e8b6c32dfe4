"""Reads arrays that are stored as a header and the values in C order: .npy files, members of .npz files, and
IDX files.

All are read in blocks of a few megabytes. Pickled data is never loaded.
"""

from __future__ import annotations

import gzip
import os
import stat
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from ddp_hpc.base.errors import DataError
from ddp_hpc.data.samples import ArrayInfo, check_array, first_line

NPY_SUFFIX = ".npy"
# The type codes of http://yann.lecun.com/exdb/mnist/, "the IDX file format"; all types are big-endian.
IDX_DTYPES = {8: "uint8", 9: "int8", 11: "int16", 12: "int32", 13: "float32", 14: "float64"}

_GZIP_MAGIC = b"\x1f\x8b"
_BLOCK_BYTES = 4 * 1024 * 1024
# Maximum size of a scalar with metadata. The largest is the recipe, which has a few hundred characters.
_MAX_MARK_BYTES = 1024 * 1024
# Limit for the text of a library's error: NumPy quotes the header that it cannot read.
_MAX_REASON = 200
# The exceptions that zipfile raises for damaged files, depending on the kind of damage.
_ZIP_ERRORS = (
    OSError,
    EOFError,
    ValueError,
    RuntimeError,
    KeyError,
    IndexError,
    struct.error,
    zlib.error,
    zipfile.BadZipFile,
)


def check_regular(path: Path) -> os.stat_result:
    """Returns the status of a regular file. Opening a pipe, for example, could block forever.

    Raises:
        DataError: the path does not exist or is not a regular file.
    """
    try:
        found = path.stat()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; check the name") from None
    if not stat.S_ISREG(found.st_mode):
        raise DataError(f"{path} is not a regular file; a data file is required")
    return found


@contextmanager
def reading(path: Path) -> Iterator[IO[bytes]]:
    """Opens a file and decompresses it if its first bytes are those of gzip. Errors become DataError."""
    check_regular(path)
    try:
        with path.open("rb") as raw:
            is_gzip = raw.read(2) == _GZIP_MAGIC
            raw.seek(0)
            if not is_gzip:
                yield raw
                return
            with gzip.GzipFile(fileobj=raw) as unpacked:
                yield cast(IO[bytes], unpacked)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}; check the name, or download it again") from error


@dataclass(frozen=True)
class ArrayReader:
    """An array whose samples are read sequentially."""

    path: Path
    info: ArrayInfo
    open: Callable[[], AbstractContextManager[IO[bytes]]]
    """Opens the file at the first byte of the array's header."""
    header_bytes: int
    file_dtype: np.dtype[Any]
    """The dtype of `info` in the byte order of the file."""

    def blocks(self) -> Iterator[NDArray[Any]]:
        """Yields all samples in order, about 4 MiB at a time, as arrays (samples, ...) in native byte order.

        Raises:
            DataError: the file is damaged, or its length does not match the header.
        """
        num_samples, shape = self.info.num_samples, self.info.shape
        sample_bytes = prod(shape) * self.file_dtype.itemsize
        step = max(1, _BLOCK_BYTES // sample_bytes)
        with self.open() as file:
            file.read(self.header_bytes)
            for start in range(0, num_samples, step):
                num = min(step, num_samples - start)
                data = _read(file, num * sample_bytes)
                if len(data) != num * sample_bytes:
                    found = start + len(data) // sample_bytes
                    raise DataError(
                        f"{self.path} is truncated: {self.info.key} ends after {found} of {num_samples} "
                        "samples; copy or write it again"
                    )
                values = np.frombuffer(data, self.file_dtype).reshape(num, *shape)
                yield values.astype(self.info.dtype, copy=False)
            # Reading up to the end makes zip and gzip verify their checksums.
            if file.read(1):
                raise DataError(
                    f"{self.path}: {self.info.key} has more data than the {num_samples} samples in its "
                    "header; copy or write it again"
                )


def open_array(path: Path, key: str) -> ArrayReader:
    """Opens the array of a .npy or IDX file, plain or gzipped; the first bytes identify the format.

    Raises:
        DataError: the file is missing or damaged, or its array cannot be used for training.
    """
    with reading(path) as file:
        magic = file.read(len(npy.MAGIC_PREFIX))
        file.seek(0)
        shape, dtype = (_npy_header if magic == npy.MAGIC_PREFIX else _idx_header)(path, key, file)
        info = check_array(path, key, shape, dtype)
        needed_bytes = file.tell() + prod(shape) * dtype.itemsize
        # The size of gzipped data is known only after decompression.
        num_bytes = needed_bytes if isinstance(file, gzip.GzipFile) else os.fstat(file.fileno()).st_size
        if num_bytes != needed_bytes:
            raise DataError(
                f"{path} has {num_bytes} bytes, but its header describes {needed_bytes}; "
                "copy or write it again"
            )
        return ArrayReader(path, info, partial(reading, path), file.tell(), dtype)


def npz_keys(path: Path) -> list[str]:
    """Returns the names of the arrays in an .npz file.

    Raises:
        DataError: the file is damaged.
    """
    with _zip(path) as archive:
        return [name.removesuffix(NPY_SUFFIX) for name in archive.namelist() if name.endswith(NPY_SUFFIX)]


def open_npz_array(path: Path, key: str) -> ArrayReader:
    """Opens one array of a compressed or uncompressed .npz file.

    Raises:
        DataError: the file is damaged, or the array cannot be used for training.
    """
    with _member(path, key) as file:
        shape, dtype = _npy_header(path, key, file)
        info = check_array(path, key, shape, dtype)
        return ArrayReader(path, info, partial(_member, path, key), file.tell(), dtype)


def read_npz_scalars(path: Path) -> dict[str, int | str]:
    """Reads the integer and text scalars of an .npz file, such as `num_classes` and `recipe`.

    Raises:
        DataError: the file is damaged.
    """
    marks: dict[str, int | str] = {}
    for key in npz_keys(path):
        with _member(path, key) as file:
            shape, dtype = _npy_header(path, key, file)
            if shape == () and dtype.kind in "iuU" and 0 < dtype.itemsize <= _MAX_MARK_BYTES:
                marks[key] = np.frombuffer(file.read(dtype.itemsize), dtype)[0].item()
    return marks


@contextmanager
def _zip(path: Path) -> Iterator[zipfile.ZipFile]:
    try:
        with zipfile.ZipFile(path) as archive:
            yield archive
    except _ZIP_ERRORS as error:
        reason = first_line(error)[:_MAX_REASON]
        raise DataError(f"{path} cannot be read as .npz: {reason}; copy or write it again") from None


@contextmanager
def _member(path: Path, key: str) -> Iterator[IO[bytes]]:
    with _zip(path) as archive, archive.open(key + NPY_SUFFIX) as member:
        yield member


def _npy_header(path: Path, key: str, file: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    try:
        version = npy.read_magic(file)
        # NumPy uses version 3 only for structured arrays, which cannot be samples.
        read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, is_fortran, dtype = read(file)
        if min(shape, default=0) < 0:
            raise ValueError(f"its shape is {shape}")
    # The header is a Python literal, so a damaged one can raise almost any exception.
    except Exception as error:
        reason = first_line(error)[:_MAX_REASON]
        raise DataError(
            f"{path}: {key} has a damaged .npy header: {reason}; copy or write it again"
        ) from None
    if is_fortran and len(shape) > 1:
        raise DataError(
            f"{path}: {key} is in Fortran order, so the values of a sample are not contiguous; "
            "save numpy.ascontiguousarray(array) instead"
        )
    return shape, dtype


def _idx_header(path: Path, _: str, file: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    magic = file.read(4)
    if len(magic) < 4 or magic[:2] != b"\0\0" or magic[2] not in IDX_DTYPES:
        raise DataError(
            f"{path} is neither a .npy nor an IDX file (it begins with {magic.hex() or 'no bytes'}). "
            "Pass two such files, src first, or one file with both arrays."
        )
    sizes = file.read(4 * magic[3])
    if len(sizes) < 4 * magic[3]:
        raise DataError(f"{path} ends inside its header of {4 + 4 * magic[3]} bytes; copy it again")
    shape = struct.unpack(f">{magic[3]}I", sizes)
    if 0 in shape:
        raise DataError(f"{path} has shape {shape} and thus contains no values; use another file")
    return shape, np.dtype(IDX_DTYPES[magic[2]]).newbyteorder(">")


def _read(file: IO[bytes], num_bytes: int) -> bytearray:
    """Reads up to `num_bytes` in small blocks, so that a wrong size in a header allocates no memory."""
    data = bytearray()
    while more := file.read(min(_BLOCK_BYTES, num_bytes - len(data))):
        data += more
    return data
