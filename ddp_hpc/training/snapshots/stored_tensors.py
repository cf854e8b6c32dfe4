"""Reads tensors of a sharded snapshot, or parts of them, from the bytes whose checksums were verified.

Only the chunks that contain the requested values are read, and the beginning of each file that is used.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from ddp_hpc.errors import DdpHpcError
from ddp_hpc.training.snapshots.host_buffer import Specs
from ddp_hpc.training.snapshots.shard_index import (
    Part,
    StoredFile,
    StoredTensor,
    parse_files,
    parse_tensors,
)

# The most bytes of a part that are in memory in addition to the result.
_BAND_BYTES = 32 * 2**20
# Open files, each with one chunk in memory.
_MOST_OPEN = 8


class DamagedSnapshotError(DdpHpcError):
    """The snapshot is truncated, modified or unreadable."""


def open_regular(path: Path) -> BinaryIO:
    """Opens a regular file for reading. Opening a pipe would block, and a device may never end."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError("not a regular file")
    return path.open("rb")


class StoredTensors(Mapping[str, Tensor]):
    """The tensors of one section of a sharded snapshot. A tensor is read each time it is accessed.

    Raises:
        DamagedSnapshotError: on construction, if the index is invalid; and by every access, if a file is
            missing, has another size, or has another checksum.
    """

    def __init__(self, path: Path, about: Mapping[str, Any], section: str) -> None:
        try:
            self._files, self._tensors = parse_files(about), parse_tensors(about, section)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
            raise DamagedSnapshotError(f"{path / 'snapshot.json'} has an invalid index") from error
        self._path, self._chunk_bytes = path, about["chunk_bytes"]
        self._header_bytes: dict[str, int] = {}
        for tensor in self._tensors.values():
            for part in tensor.parts:
                self._header_bytes[part.file] = min(part.begin, self._header_bytes.get(part.file, part.begin))
        self._open: dict[str, _VerifiedFile] = {}
        self._verified_headers: set[str] = set()

    @property
    def specs(self) -> Specs:
        """Shape and type of each tensor."""
        return {name: (tensor.shape, tensor.dtype) for name, tensor in self._tensors.items()}

    def __getitem__(self, name: str) -> Tensor:
        shape = self._tensors[name].shape
        return self.read(name, (0,) * len(shape), shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def read(self, name: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        """Reads the rectangular part of a tensor that begins at `offset`."""
        stored = self._tensors[name]
        found = torch.zeros(shape, dtype=stored.dtype)
        for part in stored.parts:
            begins = [max(mine, theirs) for mine, theirs in zip(offset, part.offset, strict=True)]
            ends = [
                min(mine + size, theirs + of_part)
                for mine, size, theirs, of_part in zip(offset, shape, part.offset, part.shape, strict=True)
            ]
            if all(begin < end for begin, end in zip(begins, ends, strict=True)):
                target = found[
                    tuple(slice(b - o, e - o) for b, e, o in zip(begins, ends, offset, strict=True))
                ]
                box = [slice(b - o, e - o) for b, e, o in zip(begins, ends, part.offset, strict=True)]
                self._copy(stored, part, box, target)
        return found

    def check_sizes(self) -> None:
        """Raises DamagedSnapshotError if a file of this section is missing or has another size."""
        for name in self._header_bytes:
            _check_size(self._path / name, self._files[name])

    def close(self) -> None:
        """Closes the open files, which the next access opens again."""
        for file in self._open.values():
            file.close()
        self._open.clear()

    def _copy(self, stored: StoredTensor, part: Part, box: list[slice], target: Tensor) -> None:
        """Copies the box of a part to `target`, a band of rows at a time."""
        reader = self._reader(part.file)
        if not part.shape:
            target.copy_(reader.read(part.begin, stored.dtype.itemsize).view(stored.dtype).reshape(()))
            return
        rows, row_shape = box[0], part.shape[1:]
        row_bytes = prod(row_shape) * stored.dtype.itemsize
        step = max(1, _BAND_BYTES // max(1, row_bytes))
        for first in range(rows.start, rows.stop, step):
            last = min(first + step, rows.stop)
            content = reader.read(part.begin + first * row_bytes, (last - first) * row_bytes)
            band = content.view(stored.dtype).reshape(last - first, *row_shape)
            target[first - rows.start : last - rows.start].copy_(band[(slice(None), *box[1:])])

    def _reader(self, name: str) -> _VerifiedFile:
        if name not in self._open:
            if len(self._open) == _MOST_OPEN:
                self._open.pop(next(iter(self._open))).close()
            self._open[name] = _VerifiedFile(self._path / name, self._files[name], self._chunk_bytes)
        if name not in self._verified_headers:
            # Nothing here depends on the header, but other programs read it.
            self._open[name].read(0, self._header_bytes[name])
            self._verified_headers.add(name)
        return self._open[name]


def _check_size(path: Path, file: StoredFile) -> None:
    try:
        num_bytes = path.stat().st_size
    except OSError as error:
        raise DamagedSnapshotError(f"{path}: cannot be read") from error
    if num_bytes != file.num_bytes:
        raise DamagedSnapshotError(f"{path} has {num_bytes} bytes instead of {file.num_bytes}")


class _VerifiedFile:
    """A file of which only verified chunks are used."""

    def __init__(self, path: Path, stored: StoredFile, chunk_bytes: int) -> None:
        self._path, self._stored, self._chunk_bytes = path, stored, chunk_bytes
        self._number, self._content = -1, b""
        _check_size(path, stored)
        try:
            self._file: BinaryIO = open_regular(path)
        except OSError as error:
            raise DamagedSnapshotError(f"{path}: cannot be read") from error

    def read(self, begin: int, num_bytes: int) -> Tensor:
        """Returns the bytes as a 1-d uint8 tensor."""
        found = bytearray(num_bytes)
        at = begin
        while at < begin + num_bytes:
            number, inside = divmod(at, self._chunk_bytes)
            content = self._chunk(number)[inside : inside + begin + num_bytes - at]
            found[at - begin : at - begin + len(content)] = content
            at += len(content)
        return torch.frombuffer(found, dtype=torch.uint8) if found else torch.empty(0, dtype=torch.uint8)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _chunk(self, number: int) -> bytes:
        if number != self._number:
            size = min(self._chunk_bytes, self._stored.num_bytes - number * self._chunk_bytes)
            try:
                content = os.pread(self._file.fileno(), size, number * self._chunk_bytes)
            except OSError as error:
                raise DamagedSnapshotError(f"{self._path}: cannot be read") from error
            if hashlib.sha256(content).hexdigest() != self._stored.chunks[number]:
                raise DamagedSnapshotError(f"{self._path}: a SHA-256 checksum does not match")
            self._number, self._content = number, content
        return self._content
