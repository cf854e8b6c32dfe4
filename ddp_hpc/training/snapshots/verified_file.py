"""Reads the files of a snapshot, and returns only bytes whose checksum was verified."""

from __future__ import annotations

import hashlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from ddp_hpc.base.errors import DdpHpcError


class DamagedSnapshotError(DdpHpcError):
    """The snapshot is truncated, modified or unreadable."""


@dataclass(frozen=True)
class StoredFile:
    """The size and the checksums of a file with shards, each chunk of which can be verified separately."""

    num_bytes: int
    chunk_bytes: int
    chunks: str
    """The SHA-256 checksums of the chunks, in hexadecimal, one after another."""
    begin: int
    """The position of the first chunk; the bytes before it have been verified already."""


def open_regular(path: Path) -> BinaryIO:
    """Opens a regular file for reading. Opening a pipe would block, and a device may never end."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError("not a regular file")
    return path.open("rb")


def check_size(path: Path, num_bytes: int) -> None:
    """Raises DamagedSnapshotError if the file is missing or has the wrong size."""
    try:
        size = path.stat().st_size
    except OSError as error:
        raise DamagedSnapshotError(f"{path}: cannot be read") from error
    if size != num_bytes:
        raise DamagedSnapshotError(f"{path} has {size} bytes instead of {num_bytes}")


def read_beginning(path: Path, num_bytes: int, sha256: str) -> bytes:
    """Returns the first bytes of a file after their checksum was verified.

    Raises:
        DamagedSnapshotError: the file cannot be read, or the checksum does not match.
    """
    try:
        with open_regular(path) as file:
            content = file.read(num_bytes)
    except OSError as error:
        raise DamagedSnapshotError(f"{path}: cannot be read") from error
    if hashlib.sha256(content).hexdigest() != sha256:
        raise DamagedSnapshotError(f"{path}: a SHA-256 checksum does not match")
    return content


class VerifiedFile:
    """Reads a file in chunks, and returns only bytes of verified chunks.

    Raises:
        DamagedSnapshotError: on construction, if the file has the wrong size or cannot be opened; by `read`,
            if a chunk cannot be read or its checksum does not match.
    """

    def __init__(self, path: Path, stored: StoredFile) -> None:
        self._path, self._stored = path, stored
        self._number, self._content = -1, b""
        check_size(path, stored.num_bytes)
        try:
            self._file: BinaryIO = open_regular(path)
        except OSError as error:
            raise DamagedSnapshotError(f"{path}: cannot be read") from error

    def read(self, begin: int, num_bytes: int) -> Tensor:
        """Returns the bytes as a 1-d uint8 tensor."""
        result = bytearray(num_bytes)
        at = begin
        while at < begin + num_bytes:
            number, inside = divmod(at - self._stored.begin, self._stored.chunk_bytes)
            content = self._chunk(number)[inside : inside + begin + num_bytes - at]
            result[at - begin : at - begin + len(content)] = content
            at += len(content)
        return torch.frombuffer(result, dtype=torch.uint8) if result else torch.empty(0, dtype=torch.uint8)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _chunk(self, number: int) -> bytes:
        if number != self._number:
            stored, begin = self._stored, self._stored.begin + number * self._stored.chunk_bytes
            size = min(stored.chunk_bytes, stored.num_bytes - begin)
            try:
                content = os.pread(self._file.fileno(), size, begin)
            except OSError as error:
                raise DamagedSnapshotError(f"{self._path}: cannot be read") from error
            if hashlib.sha256(content).hexdigest() != stored.chunks[64 * number : 64 * (number + 1)]:
                raise DamagedSnapshotError(f"{self._path}: a SHA-256 checksum does not match")
            self._number, self._content = number, content
        return self._content
