"""Converts MNIST's IDX files, plain or gzipped, to a data file.

An IDX file (http://yann.lecun.com/exdb/mnist/, "the IDX file format") consists of two zero
bytes, a type code (8 for unsigned bytes), the number of axes, each size in 4 bytes
big-endian, and the values. EMNIST, Fashion-MNIST and KMNIST use the same format.
"""

from __future__ import annotations

import gzip
import hashlib
import struct
import zlib
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from data_gen.formats import Array, Contents, plain_text
from data_gen.writer import Chunk, GenerateResult, Progress, write_file
from ddp_hpc.base import data_file_layout
from ddp_hpc.base.data_file_layout import SRC, TEST_SRC, TEST_TGT, TGT
from ddp_hpc.base.errors import DataError
from ddp_hpc.data.open_file import check_readable_file

_GZIP_MAGIC = b"\x1f\x8b"
_UNSIGNED_BYTE = 8
# The number of images that are converted to floats at once.
_BLOCK_IMAGES = 4096

_Bytes: TypeAlias = NDArray[np.uint8]


def convert_idx(
    images: Path,
    labels: Path,
    path: Path,
    *,
    test_images: Path | None = None,
    test_labels: Path | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> GenerateResult:
    """Writes src (N, 1, rows, columns) float32 in [0, 1] and tgt (N,) int64, with the test set in `test/`.

    The bytes of the input files are kept in memory.

    Raises:
        DataError: an IDX file is damaged or does not match the others.
        RequestError: `data_gen.generate` would raise it for this output.
        DdpHpcError: writing failed; no partial file is left.
    """
    if (test_images is None) != (test_labels is None):
        raise DataError(
            "a test set requires both --test-images and --test-labels; give both options or neither"
        )
    files = {SRC: images, TGT: labels}
    values = dict(zip(files, _pair(images, labels), strict=True))
    if test_images is not None and test_labels is not None:
        files |= {TEST_SRC: test_images, TEST_TGT: test_labels}
        values |= zip((TEST_SRC, TEST_TGT), _pair(test_images, test_labels), strict=True)
        size, test_size = values[SRC].shape[1:], values[TEST_SRC].shape[1:]
        if size != test_size:
            raise DataError(
                f"{images} has images of shape {size}, but {test_images} has {test_size}; "
                "use files of the same data set"
            )
    names = ", ".join(plain_text(file.name) for file in files.values())
    contents = Contents(
        arrays=tuple(_array(name, array) for name, array in values.items()),
        recipe={
            "kind": "idx",
            "sha256": [hashlib.sha256(array.data).hexdigest() for array in values.values()],
            "format_version": data_file_layout.FORMAT_VERSION,
        },
        attributes={
            data_file_layout.ATTR_NUM_CLASSES: 1
            + max(int(array.max()) for name, array in values.items() if not _is_image(name)),
            data_file_layout.ATTR_SOURCE: f"IDX files {names}",
        },
    )
    return write_file(path, contents, lambda: _chunks(values), force=force, progress=progress)


def _pair(images: Path, labels: Path) -> tuple[_Bytes, _Bytes]:
    pair = _read(images, "images", 3), _read(labels, "labels", 1)
    num_images, num_labels = map(len, pair)
    if num_images != num_labels:
        raise DataError(
            f"{images} has {num_images} images, but {labels} has {num_labels} labels; "
            "use two files of the same data set"
        )
    return pair


def _read(path: Path, what: str, num_axes: int) -> _Bytes:
    check_readable_file(path)
    try:
        data = path.read_bytes()
        if data.startswith(_GZIP_MAGIC):
            data = gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}; check it, or download it again") from error
    magic, header_bytes = bytes((0, 0, _UNSIGNED_BYTE, num_axes)), 4 + 4 * num_axes
    if data[:4] != magic:
        raise DataError(
            f"{path} begins with {data[:4].hex() or 'no bytes'}, but an IDX file of {what} begins with "
            f"{magic.hex()}; pass the images first, then the labels"
        )
    shape = struct.unpack_from(f">{num_axes}I", data.ljust(header_bytes, b"\0"), 4)
    if len(data) != header_bytes + prod(shape) or 0 in shape:
        raise DataError(
            f"{path} has {len(data)} bytes, but its header describes {what} of shape {shape}; "
            "download it again"
        )
    return np.frombuffer(data, np.uint8, offset=header_bytes).reshape(shape)


def _is_image(name: str) -> bool:
    return name in (SRC, TEST_SRC)


def _array(name: str, values: _Bytes) -> Array:
    num, *shape = values.shape
    return Array(name, (num, 1, *shape), "float32") if _is_image(name) else Array(name, (num,), "int64")


def _chunks(values: dict[str, _Bytes]) -> Iterator[Chunk]:
    for name, array in values.items():
        for start in range(0, len(array), _BLOCK_IMAGES):
            block = array[start : start + _BLOCK_IMAGES]
            first = start * prod(array.shape[1:])
            if _is_image(name):
                yield name, first, block.astype(np.float32) / np.float32(255.0)
            else:
                yield name, first, block.astype(np.int64)
