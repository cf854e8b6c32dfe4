"""The index of a sharded snapshot: which file contains which part of which tensor, and all checksums.

    step_00000120/snapshot.json                the description of the run, and this index
                  model-00000.safetensors      the shards of rank 0, by the names of the whole tensors
                  training-00000.safetensors
                  model-00001.safetensors      the shards of rank 1

Each file has one SHA-256 checksum per chunk of `chunk_bytes`, so that a part of a file can be read and
verified without the rest. docs/reference/snapshot-format.md describes the entries.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from ddp_hpc.training.snapshots.host_buffer import DTYPES, FileBuffer, Place

CHUNK_BYTES = 4 * 2**20
SECTIONS = ("model", "training")
_FILE = re.compile(r"(model|training)-\d{5,9}\.safetensors")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_TORCH_DTYPES = {code: dtype for dtype, code in DTYPES.items()}


@dataclass(frozen=True)
class Part:
    """A rectangular part of a tensor, whose values are consecutive in a file."""

    file: str
    begin: int
    """The position of the first byte in the file."""
    offset: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the snapshot and the parts that it consists of."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class StoredFile:
    """A file of the snapshot."""

    num_bytes: int
    chunks: tuple[str, ...]
    """The SHA-256 checksum of each chunk."""


def shard_file(section: str, rank: int) -> str:
    """Returns the name of a rank's file, such as `model-00003.safetensors`."""
    return f"{section}-{rank:05d}.safetensors"


def index_of_rank(
    rank: int,
    files: Mapping[str, Mapping[str, Any]],
    buffers: Mapping[str, FileBuffer],
    places: Mapping[str, Mapping[str, Place]],
) -> dict[str, Any]:
    """Returns the entries of a rank's own files, which `merged` combines with those of the other ranks."""
    tensors: dict[str, dict[str, Any]] = {}
    for section in SECTIONS:
        name_of_file = shard_file(section, rank)
        found = tensors[section] = {}
        if name_of_file not in buffers:
            continue
        for name, (shape, dtype) in buffers[name_of_file].specs.items():
            place = places[section].get(name, Place(shape, (0,) * len(shape)))
            part = [name_of_file, buffers[name_of_file].begins[name], list(place.offset), list(shape)]
            found[name] = {"dtype": DTYPES[dtype], "shape": list(place.shape), "parts": [part]}
    return {"files": dict(files), "tensors": tensors}


def merged(indexes: Iterable[Mapping[str, Any]], chunk_bytes: int) -> dict[str, Any]:
    """Returns the index of the whole snapshot.

    Raises:
        ValueError: the parts of a tensor do not fit together.
    """
    files: dict[str, Any] = {}
    tensors: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for index in indexes:
        files.update(index["files"])
        for section, entries in index["tensors"].items():
            for name, entry in entries.items():
                known = tensors[section].setdefault(name, {**entry, "parts": []})
                if (known["dtype"], known["shape"]) != (entry["dtype"], entry["shape"]):
                    raise ValueError(f"{name} has another shape or data type on another rank")
                known["parts"] += entry["parts"]
    found = {"chunk_bytes": chunk_bytes, "files": files, "tensors": tensors}
    for section in SECTIONS:
        parse_tensors(found, section)
    return found


def parse_files(about: Mapping[str, Any]) -> dict[str, StoredFile]:
    """Returns the files of an index.

    Raises:
        ValueError, TypeError, KeyError, AttributeError: an entry is invalid.
    """
    chunk_bytes = _whole(about["chunk_bytes"])
    if not chunk_bytes:
        raise ValueError("chunk_bytes is 0")
    found = {}
    for name, entry in about["files"].items():
        num_bytes, chunks = _whole(entry["bytes"]), tuple(entry["chunks"])
        if not _FILE.fullmatch(name) or not all(_DIGEST.fullmatch(chunk) for chunk in chunks):
            raise ValueError(f"the entry of {name} is invalid")
        if len(chunks) != -(-num_bytes // chunk_bytes):
            raise ValueError(f"{name} has {len(chunks)} checksums")
        found[name] = StoredFile(num_bytes, chunks)
    return found


def parse_tensors(about: Mapping[str, Any], section: str) -> dict[str, StoredTensor]:
    """Returns the tensors of one section of an index.

    Raises:
        ValueError, TypeError, KeyError, AttributeError: an entry is invalid.
    """
    sizes = {name: file.num_bytes for name, file in parse_files(about).items()}
    return {name: _parsed_tensor(name, entry, sizes) for name, entry in about["tensors"][section].items()}


def _parsed_tensor(name: str, entry: Mapping[str, Any], sizes: Mapping[str, int]) -> StoredTensor:
    dtype, shape = _TORCH_DTYPES[entry["dtype"]], tuple(map(_whole, entry["shape"]))
    parts = []
    for file, begin, offset, of_part in entry["parts"]:
        part = Part(file, _whole(begin), tuple(map(_whole, offset)), tuple(map(_whole, of_part)))
        if len(part.offset) != len(shape) or len(part.shape) != len(shape):
            raise ValueError(f"a part of {name} has another number of dimensions")
        if any(at + size > whole for at, size, whole in zip(part.offset, part.shape, shape, strict=True)):
            raise ValueError(f"a part of {name} is outside of the tensor")
        if part.begin + prod(part.shape) * dtype.itemsize > sizes[file]:
            raise ValueError(f"a part of {name} is outside of its file")
        parts.append(part)
    if sum(prod(part.shape) for part in parts) != prod(shape) or not parts:
        raise ValueError(f"the parts of {name} do not have as many values as the tensor")
    return StoredTensor(dtype, shape, tuple(parts))


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{value!r} is not a size")
    return value
