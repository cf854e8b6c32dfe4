"""Gathers samples from a memory map with a single copy, from the page cache into the batch.

This was the fastest of the measured ways to read a batch: it takes a tenth of the time of one
h5py call per sample, and a fifth of the time of one h5py call per batch.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from ddp_hpc.base.errors import DataError
from ddp_hpc.data.samples import ArrayInfo, Gather, OpenArrays


@dataclass(frozen=True)
class FileIdentity:
    """Distinguishes a file from another one of the same name.

    Modification times are not used, because parallel file systems update them with a delay.
    """

    inode: int
    num_bytes: int

    @classmethod
    def of(cls, path: Path) -> FileIdentity:
        """Returns the identity of the file that has this name now.

        Raises:
            DataError: the file no longer exists.
        """
        try:
            status = path.stat()
        except OSError as error:
            raise DataError(
                f"{path} no longer exists: {error}; restore it and restart the program"
            ) from error
        return cls(status.st_ino, status.st_size)

    def check(self, path: Path) -> None:
        """Raises DataError if the name now belongs to another file."""
        if FileIdentity.of(path) != self:
            raise DataError(f"{path} was replaced or changed since it was first opened; restart the program")


@dataclass(frozen=True)
class ArrayPlace:
    """The position of an array's raw values in the file."""

    info: ArrayInfo
    offset: int

    @property
    def num_bytes(self) -> int:
        """The size of the values in bytes."""
        return self.info.num_samples * self.info.sample_bytes


def check_within(path: Path, identity: FileIdentity, place: ArrayPlace) -> None:
    """Raises DataError if the file is too short for the array.

    Accessing a memory map beyond the end of its file would kill the process.
    """
    end = place.offset + place.num_bytes
    if place.offset < 0 or end > identity.num_bytes:
        raise DataError(
            f"{path} is truncated: {place.info.key} ends at byte {end}, but the file has "
            f"{identity.num_bytes} bytes; copy or write it again"
        )


def gather_from(array: NDArray[Any]) -> Gather:
    """Returns a function that copies the requested samples of an array, and nothing else, to a buffer."""
    if not array.flags.c_contiguous or not array.dtype.isnative:

        def gather_strided(indices: NDArray[np.int64], out: NDArray[Any]) -> None:
            out[...] = array[indices]

        return gather_strided
    # np.take would first copy an unaligned array as a whole, so such an array is viewed as bytes.
    as_bytes = not array.flags.aligned
    rows = array.reshape(len(array), -1).view(np.uint8) if as_bytes else array

    def gather(indices: NDArray[np.int64], out: NDArray[Any]) -> None:
        if as_bytes:
            out = out.reshape(len(indices), rows.shape[1] // array.itemsize).view(np.uint8)
        # Samples.read has checked the indices. With mode="raise", np.take would make a second copy.
        np.take(rows, indices, axis=0, out=out, mode="clip")

    return gather


@dataclass(frozen=True)
class OpenFile:
    """A file that is held open, so that its length can be checked while it is mapped."""

    path: Path
    file: IO[bytes]
    identity: FileIdentity

    @classmethod
    def open(cls, path: Path, identity: FileIdentity) -> OpenFile:
        """Opens the file if it still has that identity.

        Raises:
            DataError: the name now belongs to another file, or the file cannot be opened.
        """
        identity.check(path)
        try:
            return cls(path, path.open("rb"), identity)
        except OSError as error:
            raise DataError(f"{path} cannot be reopened: {error}; check its permissions") from error

    def check(self) -> None:
        """Raises DataError if the length of the file has changed.

        Accessing a map beyond the end of a truncated file kills the process with
        SIGBUS, so this is called before each read. It takes a microsecond.
        """
        num_bytes = os.fstat(self.file.fileno()).st_size
        if num_bytes != self.identity.num_bytes:
            raise DataError(
                f"{self.path} changed while it was read: its size went from {self.identity.num_bytes} to "
                f"{num_bytes} bytes. Write the file again, and do not modify a file that a job reads."
            )

    def map(self, place: ArrayPlace) -> NDArray[Any]:
        """Returns the array of shape (num_samples, ...) as a memory map of the file.

        Raises:
            DataError: the file system cannot map files.
        """
        info = place.info
        shape = (info.num_samples, *info.shape)
        try:
            # Indexing a np.memmap costs more than copying a small sample, so an ndarray is returned.
            return np.memmap(self.file, info.dtype, "r", place.offset, shape).view(np.ndarray)
        except (OSError, ValueError) as error:
            raise DataError(
                f"{self.path} cannot be memory-mapped: {error}; copy it to another file system"
            ) from error


def open_mapped(path: Path, identity: FileIdentity, src: ArrayPlace, tgt: ArrayPlace) -> OpenArrays:
    """Maps both arrays. They are unmapped when the last reference to the result is dropped.

    Raises:
        DataError: the file was replaced, or it cannot be opened.
    """
    file = OpenFile.open(path, identity)
    return OpenArrays(
        gather_from(file.map(src)), gather_from(file.map(tgt)), check=file.check, close=file.file.close
    )
