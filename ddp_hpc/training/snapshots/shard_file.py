"""The safetensors file with the shards of one rank, whose header contains everything about the file.

The metadata of the header contains one SHA-256 checksum per chunk of the values, so that a part of the file
can be read and verified without the rest, and the offsets of the shards in the whole tensors.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from ddp_hpc.training.snapshots.host_buffer import DTYPES, FileBuffer, Place, Specs, file_layout

CHUNK_BYTES = 4 * 2**20
SECTIONS = ("model", "training")
TORCH_DTYPES = {code: dtype for dtype, code in DTYPES.items()}
_AT_ONCE_BYTES = 16 * 2**20
_DIGESTS = re.compile(r"([0-9a-f]{64})*")


@dataclass(frozen=True)
class Split:
    """A dimension along which a shard contains only a part of the tensor."""

    dim: int
    offset: int
    """The offset of the shard in the whole tensor along this dimension."""
    whole: int
    """The size of the whole tensor along this dimension."""


Splits = Mapping[str, tuple[Split, ...]]
"""For each shard, the dimensions along which its tensor is divided; empty for a whole tensor."""


@dataclass(frozen=True)
class WrittenShards:
    """The file that a rank has written."""

    num_bytes: int
    header_bytes: int
    sha256: str
    """The checksum of the header."""


@dataclass(frozen=True)
class Header:
    """The contents of the header of a file."""

    specs: Specs
    """Shape and type of each shard."""
    begins: Mapping[str, int]
    """The position of each shard relative to the end of the header."""
    splits: Splits
    chunk_bytes: int
    chunks: str
    """The SHA-256 checksums of the chunks after the header, in hexadecimal, one after another."""


def shard_file(section: str, rank: int) -> str:
    """Returns the name of a rank's file, such as `model-00003.safetensors`."""
    return f"{section}-{rank:05d}.safetensors"


def splits_of(specs: Specs, places: Mapping[str, Place]) -> Splits:
    """Returns the dimensions along which the tensor of each shard is divided."""
    splits = {}
    for name, (shape, _) in specs.items():
        place = places.get(name, Place(shape, (0,) * len(shape)))
        dims = enumerate(zip(shape, place.offset, place.shape, strict=True))
        splits[name] = tuple(Split(dim, at, whole) for dim, (size, at, whole) in dims if size != whole)
    return splits


def write_shards(path: Path, buffer: FileBuffer, splits: Splits, chunk_bytes: int) -> WrittenShards:
    """Writes the file of a rank and syncs it to disk.

    Raises:
        OSError: the file cannot be written.
    """
    header = _header(buffer.specs, splits, chunk_bytes, None)
    with path.open("xb", buffering=0) as file:
        # The header contains the checksums of the values, so it is written last.
        file.seek(len(header))
        digests = write_hashed(file, _without(buffer, buffer.header_bytes), chunk_bytes)
        num_bytes = file.tell()
        header = _header(buffer.specs, splits, chunk_bytes, digests)
        file.seek(0)
        [sha256] = write_hashed(file, [memoryview(header)], None)
        os.fsync(file.fileno())
    return WrittenShards(max(num_bytes, len(header)), len(header), sha256)


def _header(specs: Specs, splits: Splits, chunk_bytes: int, digests: list[str] | None) -> bytes:
    """Returns the header; if `digests` is None, a placeholder of the same size."""
    if digests is None:
        num_bytes = sum(prod(shape) * dtype.itemsize for shape, dtype in specs.values())
        digests = ["0" * 64] * -(-num_bytes // chunk_bytes)
    of_names = [[(split.dim, split.offset, split.whole) for split in splits[name]] for name in sorted(specs)]
    metadata = {
        "chunk_bytes": str(chunk_bytes),
        "chunks": "".join(digests),
        "splits": json.dumps(of_names, separators=(",", ":")),
    }
    return file_layout(specs, metadata)[0]


def _without(buffer: FileBuffer, num_bytes: int) -> Iterable[memoryview]:
    """Yields the bytes of a buffer after the first `num_bytes`."""
    for part in buffer.parts:
        yield part.numpy().data[num_bytes:]
        num_bytes = max(0, num_bytes - len(part))


def write_hashed(file: BinaryIO, contents: Iterable[memoryview], chunk_bytes: int | None) -> list[str]:
    """Writes to an unbuffered file; returns the checksum of each chunk.

    If `chunk_bytes` is None, the only chunk contains everything.
    """
    digests, digest, left = [], hashlib.sha256(), chunk_bytes or sys.maxsize
    for content in contents:
        begin = 0
        while begin < len(content):
            # Bytes are hashed while they are in the CPU cache. If the disk is full, a write can be partial.
            chunk = content[begin : begin + min(_AT_ONCE_BYTES, left)]
            written = file.write(chunk)
            digest.update(chunk[:written])
            begin += written
            left -= written
            if not left:
                digests.append(digest.hexdigest())
                digest, left = hashlib.sha256(), chunk_bytes or sys.maxsize
    if chunk_bytes is None or left < chunk_bytes:
        digests.append(digest.hexdigest())
    return digests


def parse_header(content: bytes, num_bytes: int) -> Header:
    """Returns the contents of the header of a file of `num_bytes`.

    Raises:
        ValueError, TypeError, KeyError, AttributeError, OverflowError: the header is invalid.
    """
    if len(content) < 8 or struct.unpack("<Q", content[:8])[0] != len(content) - 8:
        raise ValueError("the header has the wrong size")
    entries = json.loads(content[8:])
    metadata = entries.pop("__metadata__")
    chunk_bytes, chunks = int(metadata["chunk_bytes"]), metadata["chunks"]
    num_chunks = -(-(num_bytes - len(content)) // max(1, chunk_bytes))
    if chunk_bytes < 1 or not _DIGESTS.fullmatch(chunks) or len(chunks) != 64 * num_chunks:
        raise ValueError("the checksums are invalid")
    specs, begins = {}, {}
    for name, entry in entries.items():
        shape, dtype = tuple(map(size_of, entry["shape"])), TORCH_DTYPES[entry["dtype"]]
        begin, end = map(size_of, entry["data_offsets"])
        if end - begin != prod(shape) * dtype.itemsize or len(content) + end > num_bytes:
            raise ValueError(f"{name} is outside the file")
        specs[name], begins[name] = (shape, dtype), begin
    of_names = zip(sorted(specs), json.loads(metadata["splits"]), strict=True)
    splits = {name: tuple(Split(*map(size_of, split)) for split in entries) for name, entries in of_names}
    return Header(specs, begins, splits, chunk_bytes, chunks)


def size_of(value: Any) -> int:
    """Returns a size or position from an index.

    Raises:
        ValueError: the value is not an integer or is out of range.
    """
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{value!r} is not a size")
    return value
