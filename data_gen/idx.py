"""MNIST's IDX files, plain or gzipped, as a data file.

The format (http://yann.lecun.com/exdb/mnist/, "the IDX file format"): two zero
bytes, a type code (8: unsigned byte), the number of axes, each size in 4 bytes
big-endian, then the values. EMNIST, Fashion-MNIST and KMNIST come the same way.
"""

from __future__ import annotations

import gzip
import hashlib
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from data_gen.formats import Array, Contents
from data_gen.writer import GenerateResult, Piece, Progress, write_file
from ddp_hpc import h5_layout
from ddp_hpc.errors import DataError

_UNSIGNED_BYTE = 8
_GZIP_MAGIC = b"\x1f\x8b"
_CHUNK_BYTES = 4 * 1024 * 1024
_IMAGE_AXES, _LABEL_AXES = 3, 1


@dataclass(frozen=True)
class IdxFile:
    """An IDX file of unsigned bytes that was read to its end once and found whole."""

    path: Path
    shape: tuple[int, ...]
    sha256: str
    """Of the values, so a file and its gzipped copy are the same."""

    def chunks(self) -> Iterator[NDArray[np.uint8]]:
        """The values, whole samples at a time, about 4 MiB each: (samples, ...)."""
        sample_bytes = prod(self.shape[1:])
        step = max(1, _CHUNK_BYTES // sample_bytes)
        with _reading(self.path) as file:
            file.read(4 + 4 * len(self.shape))
            for start in range(0, self.shape[0], step):
                num = min(step, self.shape[0] - start)
                data = file.read(num * sample_bytes)
                if len(data) != num * sample_bytes:
                    raise DataError(f"{self.path} became shorter while it was read; start again")
                yield np.frombuffer(data, np.uint8).reshape(num, *self.shape[1:])


def inspect(path: Path, num_axes: int) -> IdxFile:
    """The IDX file at `path`, read to its end.

    Raises:
        DataError: missing, damaged, cut short, or not unsigned bytes with that many axes.
    """
    what = "images" if num_axes == _IMAGE_AXES else "labels"
    with _reading(path) as file:
        magic = file.read(4)
        wanted = bytes((0, 0, _UNSIGNED_BYTE, num_axes))
        if magic != wanted:
            raise DataError(
                f"{path} begins with {magic.hex() or 'nothing'}, an IDX file of {what} with {wanted.hex()}; "
                "give the images first, then the labels"
            )
        sizes = file.read(4 * num_axes)
        if len(sizes) < 4 * num_axes:
            raise DataError(f"{path} ends within its header of {4 + 4 * num_axes} bytes; download it again")
        shape = struct.unpack(f">{num_axes}I", sizes)
        if min(shape) == 0:
            raise DataError(f"{path} holds no values: its sizes are {shape}; give another file")
        needed_bytes = prod(shape)
        digest = hashlib.sha256()
        found_bytes = 0
        # One byte more than needed is asked for, so a longer file shows and a gzip bomb ends.
        while data := file.read(min(_CHUNK_BYTES, needed_bytes + 1 - found_bytes)):
            digest.update(data)
            found_bytes += len(data)
    if found_bytes != needed_bytes:
        seen = f"only {found_bytes} bytes" if found_bytes < needed_bytes else "more bytes"
        raise DataError(
            f"{path} has {seen} of values where its sizes {shape} need {needed_bytes}; download it again"
        )
    return IdxFile(path, shape, digest.hexdigest())


@contextmanager
def _reading(path: Path) -> Iterator[BinaryIO]:
    """The file opened, unpacked where it is gzipped whatever its name; its troubles as DataError."""
    try:
        with path.open("rb") as raw:
            is_gzip = raw.read(2) == _GZIP_MAGIC
            raw.seek(0)
            if not is_gzip:
                yield raw
                return
            with gzip.GzipFile(fileobj=raw) as unpacked:
                yield cast(BinaryIO, unpacked)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}; check the name, or download it again") from error


def _pair(images: Path, labels: Path) -> tuple[IdxFile, IdxFile]:
    images_file, labels_file = inspect(images, _IMAGE_AXES), inspect(labels, _LABEL_AXES)
    if images_file.shape[0] != labels_file.shape[0]:
        raise DataError(
            f"{images} has {images_file.shape[0]} images and {labels} has {labels_file.shape[0]} labels; "
            "give two files of the same set"
        )
    return images_file, labels_file


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
    """A file with src (N, 1, rows, columns) float32 in [0, 1] and tgt (N,) int64, the test set in `test/`.

    Raises:
        DataError: an IDX file that is damaged or does not fit the others.
        RequestError: as `data_gen.generate` does.
        DdpHpcError: the writing itself failed; nothing is left behind.
    """
    pairs = [(h5_layout.SRC, h5_layout.TGT, *_pair(images, labels))]
    if (test_images is None) != (test_labels is None):
        raise DataError("a test set needs both its images and its labels; give both or neither")
    if test_images is not None and test_labels is not None:
        pairs.append((h5_layout.TEST_SRC, h5_layout.TEST_TGT, *_pair(test_images, test_labels)))
        if pairs[0][2].shape[1:] != pairs[1][2].shape[1:]:
            raise DataError(
                f"{images} has images of {pairs[0][2].shape[1:]}, {test_images} of {pairs[1][2].shape[1:]}; "
                "give files of the same set"
            )
    arrays: list[Array] = []
    for src, tgt, images_file, labels_file in pairs:
        num, rows, columns = images_file.shape
        arrays += [Array(src, (num, 1, rows, columns), "float32"), Array(tgt, labels_file.shape, "int64")]
    num_classes = 1 + max(int(chunk.max()) for _, _, _, file in pairs for chunk in file.chunks())
    contents = Contents(
        arrays=tuple(arrays),
        recipe={
            "kind": "idx",
            "sha256": [file.sha256 for _, _, *files in pairs for file in files],
            "format_version": h5_layout.FORMAT_VERSION,
        },
        attributes={
            h5_layout.ATTR_NUM_CLASSES: num_classes,
            h5_layout.ATTR_SOURCE: "IDX files "
            + ", ".join(f.path.name for _, _, *files in pairs for f in files),
        },
    )

    def pieces() -> Iterator[Piece]:
        for src, tgt, images_file, labels_file in pairs:
            first = 0
            for chunk in images_file.chunks():
                yield src, first, chunk.astype(np.float32) / np.float32(255.0)
                first += chunk.size
            first = 0
            for chunk in labels_file.chunks():
                yield tgt, first, chunk.astype(np.int64)
                first += chunk.size

    return write_file(path, contents, pieces, force=force, progress=progress)
