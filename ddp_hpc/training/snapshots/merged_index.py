"""Reads the index of snapshots of format 2, in which snapshot.json lists all parts and checksums.

    step_00000120/snapshot.json                the description of the run, and the index of all shards
                  model-00000.safetensors      the shards of rank 0, by the names of the whole tensors
                  training-00000.safetensors
                  model-00001.safetensors      the shards of rank 1

Each file has one SHA-256 checksum per chunk of `chunk_bytes`. The first chunk begins at the start of the
file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from ddp_hpc.training.snapshots.host_buffer import Specs
from ddp_hpc.training.snapshots.shard_file import TORCH_DTYPES, size_of
from ddp_hpc.training.snapshots.shard_index import Part
from ddp_hpc.training.snapshots.verified_file import (
    DamagedSnapshotError,
    StoredFile,
    VerifiedFile,
    check_size,
)

_FILE = re.compile(r"(model|training)-\d{5,9}\.safetensors")
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class _Tensor:
    """A tensor of the snapshot, and all parts of which it consists."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: tuple[Part, ...]


class MergedIndex:
    """The tensors of one section of a snapshot of format 2.

    Raises:
        DamagedSnapshotError: on construction, if the index is invalid.
    """

    def __init__(self, path: Path, about: Mapping[str, Any], section: str) -> None:
        self.path = path
        try:
            self._files = _parse_files(about)
            self._tensors = {
                name: _parse_tensor(name, entry, self._files)
                for name, entry in about["tensors"][section].items()
            }
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
            raise DamagedSnapshotError(f"{path / 'snapshot.json'} has an invalid index") from error
        self._header_bytes: dict[str, int] = {}
        for tensor in self._tensors.values():
            for part in tensor.parts:
                self._header_bytes[part.file] = min(part.begin, self._header_bytes.get(part.file, part.begin))
        self._verified_headers: set[str] = set()

    @property
    def specs(self) -> Specs:
        """The shape and data type of each tensor."""
        return {name: (tensor.shape, tensor.dtype) for name, tensor in self._tensors.items()}

    def parts(self, name: str, begins: tuple[int, ...], ends: tuple[int, ...]) -> Iterator[Part]:
        """Yields the parts of a tensor that contain values between these positions, and maybe other parts."""
        del begins, ends
        yield from self._tensors[name].parts

    def file(self, name: str) -> StoredFile:
        """Returns the size and the checksums of a file."""
        if name not in self._verified_headers:
            # This class does not use the header, but other programs do, so a damaged header is an error.
            file = VerifiedFile(self.path / name, self._files[name])
            try:
                file.read(0, self._header_bytes[name])
            finally:
                file.close()
            self._verified_headers.add(name)
        return self._files[name]

    def check_sizes(self) -> None:
        """Raises DamagedSnapshotError if a file of this section is missing or has the wrong size."""
        for name in self._header_bytes:
            check_size(self.path / name, self._files[name].num_bytes)


def _parse_files(about: Mapping[str, Any]) -> dict[str, StoredFile]:
    chunk_bytes = size_of(about["chunk_bytes"])
    if not chunk_bytes:
        raise ValueError("chunk_bytes is 0")
    found = {}
    for name, entry in about["files"].items():
        num_bytes, chunks = size_of(entry["bytes"]), tuple(entry["chunks"])
        if not _FILE.fullmatch(name) or not all(_DIGEST.fullmatch(chunk) for chunk in chunks):
            raise ValueError(f"the entry of {name} is invalid")
        if len(chunks) != -(-num_bytes // chunk_bytes):
            raise ValueError(f"{name} has {len(chunks)} checksums")
        found[name] = StoredFile(num_bytes, chunk_bytes, "".join(chunks))
    return found


def _parse_tensor(name: str, entry: Mapping[str, Any], files: Mapping[str, StoredFile]) -> _Tensor:
    dtype, shape = TORCH_DTYPES[entry["dtype"]], tuple(map(size_of, entry["shape"]))
    parts = []
    for file, begin, offset, of_part in entry["parts"]:
        part = Part(file, size_of(begin), tuple(map(size_of, offset)), tuple(map(size_of, of_part)))
        if len(part.offset) != len(shape) or len(part.shape) != len(shape):
            raise ValueError(f"a part of {name} has the wrong number of dimensions")
        if any(at + size > whole for at, size, whole in zip(part.offset, part.shape, shape, strict=True)):
            raise ValueError(f"a part of {name} is outside the tensor")
        if part.begin + prod(part.shape) * dtype.itemsize > files[file].num_bytes:
            raise ValueError(f"a part of {name} is outside its file")
        parts.append(part)
    if sum(prod(part.shape) for part in parts) != prod(shape) or not parts:
        raise ValueError(f"the parts of {name} do not have as many values as the tensor")
    return _Tensor(dtype, shape, tuple(parts))
