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
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from ddp_hpc.training.snapshots.host_buffer import DTYPES, FileBuffer, Place, Specs, file_layout, num_bytes_of

CHUNK_BYTES = 4 * 2**20
SECTIONS = ("model", "training")
TORCH_DTYPES = {code: dtype for dtype, code in DTYPES.items()}
_AT_ONCE_BYTES = 16 * 2**20
_DIGESTS = re.compile(r"([0-9a-f]{64})*")


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
    places: Mapping[str, Place]
    """The place of each shard in the whole tensor."""
    chunk_bytes: int
    chunks: str
    """The SHA-256 checksums of the chunks after the header, in hexadecimal, one after another."""


def shard_file(section: str, rank: int) -> str:
    """Returns the name of a rank's file, such as `model-00003.safetensors`."""
    return f"{section}-{rank:05d}.safetensors"


def write_shards(
    path: Path, buffer: FileBuffer, places: Mapping[str, Place], chunk_bytes: int
) -> WrittenShards:
    """Writes the file of a rank and syncs it to disk.

    A tensor without an entry in `places` is whole.

    Raises:
        OSError: the file cannot be written.
    """
    header = _header(buffer.specs, places, chunk_bytes, None)
    with path.open("xb", buffering=0) as file:
        # The header contains the checksums of the values, so it is written last.
        file.seek(len(header))
        digests = _write_hashed(file, (part.numpy().data for part in buffer.parts), chunk_bytes)
        num_bytes = file.tell()
        header = _header(buffer.specs, places, chunk_bytes, digests)
        file.seek(0)
        [sha256] = _write_hashed(file, [memoryview(header)], len(header))
        os.fsync(file.fileno())
    return WrittenShards(max(num_bytes, len(header)), len(header), sha256)


def _header(specs: Specs, places: Mapping[str, Place], chunk_bytes: int, digests: list[str] | None) -> bytes:
    """Returns the header; if `digests` is None, a placeholder of the same size."""
    if digests is None:
        digests = ["0" * 64] * -(-num_bytes_of(specs) // chunk_bytes)
    of_names = [astuple(place_of(places, name, specs[name][0])) for name in sorted(specs)]
    metadata = {
        "chunk_bytes": str(chunk_bytes),
        "chunks": "".join(digests),
        "places": json.dumps(of_names, separators=(",", ":")),
    }
    return file_layout(specs, metadata)[0]


def place_of(places: Mapping[str, Place], name: str, shape: tuple[int, ...]) -> Place:
    """Returns the place of a shard with this shape; without an entry, it is the whole tensor."""
    return places.get(name) or Place(shape, (0,) * len(shape))


def _write_hashed(file: BinaryIO, contents: Iterable[memoryview], chunk_bytes: int) -> list[str]:
    """Writes to an unbuffered file; returns the checksum of each chunk."""
    digests, digest, left = [], hashlib.sha256(), chunk_bytes
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
                digest, left = hashlib.sha256(), chunk_bytes
    if left < chunk_bytes:
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
    places = {}
    for name, values in zip(sorted(specs), json.loads(metadata["places"]), strict=True):
        places[name] = Place(*(tuple(map(size_of, sizes)) for sizes in values))
    return Header(specs, begins, places, chunk_bytes, chunks)


def size_of(value: Any) -> int:
    """Returns a size or position from an index.

    Raises:
        ValueError: the value is not an integer or is out of range.
    """
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{value!r} is not a size")
    return value
