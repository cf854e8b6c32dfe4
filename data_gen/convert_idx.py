"""Converts MNIST's IDX files, plain or gzipped, to a data file.

An IDX file (http://yann.lecun.com/exdb/mnist/, "the IDX file format") consists of two zero
bytes, a type code (8 for unsigned bytes), the number of axes, each size in 4 bytes
big-endian, and the values. EMNIST, Fashion-MNIST and KMNIST use the same format.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_gen.array_readers import ArrayReader, open_array, reading
from data_gen.formats import Array, Contents, plain_text
from data_gen.writer import Chunk, GenerateResult, Progress, write_file
from ddp_hpc.base import data_file_layout
from ddp_hpc.base.errors import DataError

_UNSIGNED_BYTE = 8
_IMAGE_AXES, _LABEL_AXES = 3, 1


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

    Raises:
        DataError: an IDX file is damaged or does not match the others.
        RequestError: `data_gen.generate` would raise it for this output.
        DdpHpcError: writing failed; no partial file is left.
    """
    readers = dict(zip((data_file_layout.SRC, data_file_layout.TGT), _pair(images, labels), strict=True))
    if (test_images is None) != (test_labels is None):
        raise DataError(
            "a test set requires both --test-images and --test-labels; give both options or neither"
        )
    if test_images is not None and test_labels is not None:
        test = _pair(test_images, test_labels)
        size, test_size = readers[data_file_layout.SRC].info.shape, test[0].info.shape
        if size != test_size:
            raise DataError(
                f"{images} has images of shape {size}, but {test_images} has {test_size}; "
                "use files of the same data set"
            )
        readers |= zip((data_file_layout.TEST_SRC, data_file_layout.TEST_TGT), test, strict=True)
    # Reading the files up to the end verifies that they are complete before anything is written.
    sums = {name: _sha256_and_largest(reader) for name, reader in readers.items()}
    names = ", ".join(plain_text(reader.path.name) for reader in readers.values())
    contents = Contents(
        arrays=tuple(_array(name, reader) for name, reader in readers.items()),
        recipe={
            "kind": "idx",
            "sha256": [digest for digest, _ in sums.values()],
            "format_version": data_file_layout.FORMAT_VERSION,
        },
        attributes={
            data_file_layout.ATTR_NUM_CLASSES: 1
            + max(sums[name][1] for name in readers if not _is_image(name)),
            data_file_layout.ATTR_SOURCE: f"IDX files {names}",
        },
    )

    def chunks() -> Iterator[Chunk]:
        for name, reader in readers.items():
            first = 0
            for block in reader.blocks():
                yield name, first, _values(name, block)
                first += block.size

    return write_file(path, contents, chunks, force=force, progress=progress)


def _pair(images: Path, labels: Path) -> tuple[ArrayReader, ArrayReader]:
    pair = _open(images, "images", _IMAGE_AXES), _open(labels, "labels", _LABEL_AXES)
    num_images, num_labels = (reader.info.num_samples for reader in pair)
    if num_images != num_labels:
        raise DataError(
            f"{images} has {num_images} images, but {labels} has {num_labels} labels; "
            "use two files of the same data set"
        )
    return pair


def _open(path: Path, what: str, num_axes: int) -> ArrayReader:
    with reading(path) as file:
        magic, expected = file.read(4), bytes((0, 0, _UNSIGNED_BYTE, num_axes))
    if magic != expected:
        raise DataError(
            f"{path} begins with {magic.hex() or 'no bytes'}, but an IDX file of {what} begins with "
            f"{expected.hex()}; pass the images first, then the labels"
        )
    return open_array(path, what)


def _sha256_and_largest(reader: ArrayReader) -> tuple[str, int]:
    """Returns the SHA-256 in hex and the maximum of the values, which are decompressed if necessary."""
    digest, largest = hashlib.sha256(), 0
    for block in reader.blocks():
        digest.update(block.data)
        largest = max(largest, int(block.max()))
    return digest.hexdigest(), largest


def _is_image(name: str) -> bool:
    return name in (data_file_layout.SRC, data_file_layout.TEST_SRC)


def _array(name: str, reader: ArrayReader) -> Array:
    num, shape = reader.info.num_samples, reader.info.shape
    return Array(name, (num, 1, *shape), "float32") if _is_image(name) else Array(name, (num,), "int64")


def _values(name: str, block: NDArray[Any]) -> NDArray[Any]:
    return block.astype(np.float32) / np.float32(255.0) if _is_image(name) else block.astype(np.int64)
