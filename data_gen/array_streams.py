"""Arrays that are a header and then the values in C order: .npy files, members of .npz files, IDX files.

All are read in the same way, a few megabytes at a time; nothing is ever unpickled.
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

from ddp_hpc.data.samples import ArrayInfo, check_array, first_line
from ddp_hpc.errors import DataError

NPY_SUFFIX = ".npy"
# http://yann.lecun.com/exdb/mnist/, "the IDX file format"; all big-endian.
IDX_DTYPES = {8: "uint8", 9: "int8", 11: "int16", 12: "int32", 13: "float32", 14: "float64"}

_GZIP_MAGIC = b"\x1f\x8b"
_BLOCK_BYTES = 4 * 1024 * 1024
# Single values that describe the arrays; a recipe is a few hundred characters.
_MAX_MARK_BYTES = 1024 * 1024
# Of a library's text: NumPy quotes the header it cannot read.
_MAX_SAID = 200
# What zipfile raises from a damaged file, by the damage.
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
    """What the system says of a regular file. Opening a pipe would wait for ever.

    Raises:
        DataError: there is none, or something else.
    """
    try:
        found = path.stat()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; check the name") from None
    if not stat.S_ISREG(found.st_mode):
        raise DataError(f"{path} is not a regular file; name one that holds samples")
    return found


@contextmanager
def reading(path: Path) -> Iterator[IO[bytes]]:
    """The file opened, unpacked where it is gzipped whatever its name; its troubles as DataError."""
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
class Stream:
    """An array whose samples come one behind another."""

    path: Path
    info: ArrayInfo
    open: Callable[[], AbstractContextManager[IO[bytes]]]
    """The file at the first byte of its header."""
    header_bytes: int
    file_dtype: np.dtype[Any]
    """That of `info` in the file's byte order."""

    def blocks(self) -> Iterator[NDArray[Any]]:
        """All samples in turn, about 4 MiB at a time: (samples, ...), native byte order.

        Raises:
            DataError: damaged, or not as many values as the header says.
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
                        f"{self.path}: {self.info.key} ends after {found} of {num_samples} samples; "
                        "it was cut short, copy or write it again"
                    )
                values = np.frombuffer(data, self.file_dtype).reshape(num, *shape)
                yield values.astype(self.info.dtype, copy=False)
            # Having come to the end, zip and gzip compare their checksums.
            if file.read(1):
                raise DataError(
                    f"{self.path}: {self.info.key} goes on behind its {num_samples} samples; "
                    "copy or write it again"
                )


def open_array(path: Path, key: str) -> Stream:
    """The one array of a .npy or IDX file, plain or gzipped; the first bytes tell which.

    Raises:
        DataError: missing, damaged, or no array to train on.
    """
    with reading(path) as file:
        magic = file.read(len(npy.MAGIC_PREFIX))
        file.seek(0)
        shape, dtype = (_npy_header if magic == npy.MAGIC_PREFIX else _idx_header)(path, key, file)
        info = check_array(path, key, shape, dtype)
        needed_bytes = file.tell() + prod(shape) * dtype.itemsize
        # How much is in a gzipped file shows only at its end.
        num_bytes = needed_bytes if isinstance(file, gzip.GzipFile) else os.fstat(file.fileno()).st_size
        if num_bytes != needed_bytes:
            seen = f"only {num_bytes - file.tell()}" if num_bytes < needed_bytes else "more"
            raise DataError(
                f"{path} has {num_bytes} bytes and its header asks for {needed_bytes}: "
                f"there are {seen} bytes of values; copy or write it again"
            )
        return Stream(path, info, partial(reading, path), file.tell(), dtype)


def npz_keys(path: Path) -> list[str]:
    """The names of the arrays in an .npz file.

    Raises:
        DataError: damaged.
    """
    with _zip(path) as archive:
        return [name.removesuffix(NPY_SUFFIX) for name in archive.namelist() if name.endswith(NPY_SUFFIX)]


def open_npz_array(path: Path, key: str) -> Stream:
    """One array of an .npz file, compressed or not.

    Raises:
        DataError: damaged, or no array to train on.
    """
    with _member(path, key) as file:
        shape, dtype = _npy_header(path, key, file)
        info = check_array(path, key, shape, dtype)
        return Stream(path, info, partial(_member, path, key), file.tell(), dtype)


def read_npz_marks(path: Path) -> dict[str, int | str]:
    """The single whole numbers and texts of an .npz file, such as `num_classes` and `recipe`.

    Raises:
        DataError: damaged.
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
        said = first_line(error)[:_MAX_SAID]
        raise DataError(f"{path} cannot be read as .npz: {said}; copy or write it again") from None


@contextmanager
def _member(path: Path, key: str) -> Iterator[IO[bytes]]:
    with _zip(path) as archive, archive.open(key + NPY_SUFFIX) as member:
        yield member


def _npy_header(path: Path, key: str, file: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    try:
        version = npy.read_magic(file)
        # NumPy writes version 3 for structured arrays alone, and those are no samples.
        read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, is_fortran, dtype = read(file)
        if min(shape, default=0) < 0:
            raise ValueError(f"its shape is {shape}")
    # The header is a Python literal: a damaged one raises nearly anything.
    except Exception as error:
        said = first_line(error)[:_MAX_SAID]
        raise DataError(f"{path}: {key} has a damaged .npy header: {said}; copy or write it again") from None
    if is_fortran and len(shape) > 1:
        raise DataError(
            f"{path}: {key} lies in Fortran order, the values of a sample far apart; "
            "save numpy.ascontiguousarray(array)"
        )
    return shape, dtype


def _idx_header(path: Path, _: str, file: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    magic = file.read(4)
    if len(magic) < 4 or magic[:2] != b"\0\0" or magic[2] not in IDX_DTYPES:
        raise DataError(
            f"{path} begins with {magic.hex() or 'nothing'} and is neither .npy nor IDX; "
            "give two of those, src first, or one file that holds both arrays"
        )
    sizes = file.read(4 * magic[3])
    if len(sizes) < 4 * magic[3]:
        raise DataError(f"{path} ends within its header of {4 + 4 * magic[3]} bytes; copy it again")
    shape = struct.unpack(f">{magic[3]}I", sizes)
    if 0 in shape:
        raise DataError(f"{path} holds no values: its sizes are {shape}; give another file")
    return shape, np.dtype(IDX_DTYPES[magic[2]]).newbyteorder(">")


def _read(file: IO[bytes], num_bytes: int) -> bytearray:
    """So many bytes, or all up to the end: a header that lies takes no memory."""
    data = bytearray()
    while more := file.read(min(_BLOCK_BYTES, num_bytes - len(data))):
        data += more
    return data
