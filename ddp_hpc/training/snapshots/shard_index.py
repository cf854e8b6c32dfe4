"""The index of a snapshot, in snapshot.json; each rank reads only the parts of the files that it needs.

snapshot.json lists each tensor and each file once. The parts of tensors that are divided in the same way are
listed once for all of these tensors. Everything else about a file is in its own header (`shard_file`).
docs/reference/snapshot-format.md describes the entries.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch

from ddp_hpc.training.snapshots.host_buffer import DTYPES, Place, Specs
from ddp_hpc.training.snapshots.shard_file import (
    SECTIONS,
    TORCH_DTYPES,
    Header,
    WrittenShards,
    parse_header,
    place_of,
    shard_file,
    size_of,
)
from ddp_hpc.training.snapshots.verified_file import (
    DamagedSnapshotError,
    StoredFile,
    check_size,
    read_beginning,
)

# The position of a shard relative to the end of the header, its shape and its data type.
_Shard = tuple[int, tuple[int, ...], torch.dtype]
Member = tuple[int, ...]
"""A rank, and the offset of its part along each dimension along which the tensor is divided."""
_INVALID = (ValueError, TypeError, KeyError, AttributeError, IndexError, OverflowError, RecursionError)


@dataclass(frozen=True)
class Part:
    """A rectangular part of a tensor, whose values are consecutive in a file."""

    file: str
    begin: int
    """The position of the first byte in the file."""
    offset: tuple[int, ...]
    shape: tuple[int, ...]


def report_of_rank(
    files: Mapping[str, WrittenShards],
    specs: Mapping[str, Specs],
    places: Mapping[str, Mapping[str, Place]],
) -> dict[str, Any]:
    """Returns what rank 0 must know about the files of a rank, by section; `index_of` combines the reports.

    The size of a report does not depend on the number of tensors, but on the number of different ways in
    which the tensors are divided.
    """
    return {
        "files": {section: astuple(file) for section, file in files.items()},
        "groups": {
            section: [
                [_fingerprint(entries), parts] for parts, entries in _groups(specs[section], places[section])
            ]
            for section in files
        },
    }


def _groups(specs: Specs, places: Mapping[str, Place]) -> Iterator[tuple[list[list[int]], dict[str, Any]]]:
    """Yields each group of tensors that are divided in the same way.

    A group consists of the divided dimensions with the offsets and sizes of its shards, and of the data types
    and shapes of the whole tensors by name.
    """
    groups: dict[tuple[tuple[int, int, int], ...], dict[str, Any]] = defaultdict(dict)
    for name, (shape, dtype) in sorted(specs.items()):
        place = place_of(places, name, shape)
        dims = enumerate(zip(shape, place.offset, place.shape, strict=True))
        key = tuple((dim, offset, size) for dim, (size, offset, whole) in dims if size != whole)
        groups[key][name] = [DTYPES[dtype], list(place.shape)]
    for key, entries in groups.items():
        yield [list(divided) for divided in key], entries


def _fingerprint(entries: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()[:32]


def index_of(
    reports: Sequence[Mapping[str, Any]], read_header: Callable[[str, int], Header]
) -> dict[str, Any]:
    """Returns the entries of snapshot.json about the files of all ranks.

    `read_header` returns the header of a rank's file of a section. If several ranks hold shards of the same
    tensors, it is called for only one of them.

    Raises:
        ValueError: the parts of a tensor do not add up to the whole tensor, or ranks contradict each other.
    """
    index: dict[str, Any] = {"files": {}, "tensors": {}, "shards": {}}
    for section in SECTIONS:
        index["files"][section] = [report["files"].get(section) for report in reports]
        groups = [report["groups"].get(section, ()) for report in reports]
        index["tensors"][section], index["shards"][section] = _divided(groups, partial(read_header, section))
        _parse_tensors(index, section)
    return index


def _divided(
    groups_of_ranks: Sequence[Sequence[Any]], read_header: Callable[[int], Header]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Returns the tensors of a section, and for tensors that are divided in the same way, their parts."""
    members: dict[str, dict[tuple[Member, Member], list[Member]]] = defaultdict(lambda: defaultdict(list))
    first_ranks: dict[str, int] = {}
    for rank, groups in enumerate(groups_of_ranks):
        for fingerprint, parts in groups:
            first_ranks.setdefault(fingerprint, rank)
            dims, offsets, sizes = zip(*parts, strict=True) if parts else ((), (), ())
            members[fingerprint][dims, sizes].append((rank, *offsets))
    tensors: dict[str, Any] = {}
    names: dict[str, list[str]] = {}
    for rank in sorted(set(first_ranks.values())):
        header = read_header(rank)
        for _, entries in _groups(header.specs, header.places):
            names[_fingerprint(entries)] = list(entries)
            for name, entry in entries.items():
                if tensors.setdefault(name, entry) != entry:
                    raise ValueError(f"{name} does not have the same shape and data type on all ranks")
    shards = []
    for fingerprint, of_group in members.items():
        if fingerprint not in names:
            raise ValueError("the header of a file differs from what its rank reported")
        parts = [
            {"dims": dims, "shape": sizes, "members": places} for (dims, sizes), places in of_group.items()
        ]
        shards.append({"tensors": names[fingerprint], "parts": parts})
    return tensors, shards


@dataclass(frozen=True, eq=False)
class _Parts:
    """Parts of equal size along the divided dimensions, of all tensors that are divided in the same way."""

    dims: tuple[int, ...]
    sizes: tuple[int, ...]
    members: tuple[Member, ...]
    highest: Member
    """The highest rank and offsets."""
    _within: dict[Any, list[Member]] = field(default_factory=dict)

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of the parts of a tensor with this shape."""
        return _replaced(whole, self.dims, self.sizes)

    def within(self, begins: tuple[int, ...], ends: tuple[int, ...]) -> list[Member]:
        """Returns the members with values between these positions of the divided dimensions."""
        # A rank needs the same range of all tensors of the same shape.
        if (begins, ends) not in self._within:
            limits = list(zip(begins, ends, self.sizes, strict=True))
            self._within[begins, ends] = [
                member
                for member in self.members
                if all(
                    begin - size < offset < end
                    for offset, (begin, end, size) in zip(member[1:], limits, strict=True)
                )
            ]
        return self._within[begins, ends]


@dataclass(frozen=True)
class _Tensor:
    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: tuple[_Parts, ...]


def _replaced(values: Sequence[int], dims: Sequence[int], others: Sequence[int]) -> tuple[int, ...]:
    result = list(values)
    for dim, other in zip(dims, others, strict=True):
        result[dim] = other
    return tuple(result)


def _parse_tensors(about: Mapping[str, Any], section: str) -> dict[str, _Tensor]:
    """Returns the tensors of one section of an index.

    Raises:
        ValueError, TypeError, KeyError, AttributeError, IndexError, OverflowError: an entry is invalid.
    """
    num_ranks, entries = len(about["files"][section]), about["tensors"][section]
    parts = defaultdict[str, list[_Parts]](list)
    for group in about["shards"][section]:
        of_group = [_parse_parts(entry, num_ranks) for entry in group["parts"]]
        for name in group["tensors"]:
            parts[name] += of_group
    return {name: _parse_tensor(name, entry, tuple(parts[name])) for name, entry in entries.items()}


def _parse_parts(entry: Mapping[str, Any], num_ranks: int) -> _Parts:
    dims, sizes = (tuple(map(size_of, entry[key])) for key in ("dims", "shape"))
    members = tuple(tuple(map(size_of, member)) for member in entry["members"])
    if len(sizes) != len(dims) or len(set(dims)) != len(dims):
        raise ValueError("the dimensions of a part are invalid")
    if any(len(member) != len(dims) + 1 or member[0] >= num_ranks for member in members):
        raise ValueError("a part has the wrong number of dimensions, or is of a rank that does not exist")
    return _Parts(dims, sizes, members, tuple(map(max, zip(*members, strict=True))))


def _parse_tensor(name: str, entry: Sequence[Any], parts: tuple[_Parts, ...]) -> _Tensor:
    code, sizes = entry
    dtype, shape = TORCH_DTYPES[code], tuple(map(size_of, sizes))
    num_values = 0
    for equal in parts:
        for dim, size, offset in zip(equal.dims, equal.sizes, equal.highest[1:], strict=True):
            if offset + size > shape[dim]:
                raise ValueError(f"a part of {name} is outside the tensor")
        num_values += len(equal.members) * prod(equal.shape(shape))
    if num_values != prod(shape) or not parts:
        raise ValueError(f"the parts of {name} do not have as many values as the tensor")
    return _Tensor(dtype, shape, parts)


def _parse_file(entry: Sequence[Any] | None) -> WrittenShards | None:
    if entry is None:
        return None
    num_bytes, header_bytes, sha256 = entry
    return WrittenShards(size_of(num_bytes), size_of(header_bytes), str(sha256))


class ShardIndex:
    """The tensors of one section of a snapshot.

    The header of a file is read when a part in this file is needed for the first time.

    Raises:
        DamagedSnapshotError: on construction, if the index is invalid; by each access, if a header is damaged
            or its checksum does not match.
    """

    def __init__(self, path: Path, about: Mapping[str, Any], section: str) -> None:
        self.path, self._section = path, section
        try:
            self._tensors = _parse_tensors(about, section)
            self._files = tuple(map(_parse_file, about["files"][section]))
        except _INVALID as error:
            raise DamagedSnapshotError(f"{path / 'snapshot.json'} has an invalid index") from error
        self._headers: dict[str, tuple[StoredFile, Mapping[str, _Shard]]] = {}
        self._layouts: dict[Any, Mapping[str, _Shard]] = {}

    @property
    def specs(self) -> Specs:
        """The shape and data type of each tensor."""
        return {name: (tensor.shape, tensor.dtype) for name, tensor in self._tensors.items()}

    def parts(self, name: str, begins: tuple[int, ...], ends: tuple[int, ...]) -> Iterator[Part]:
        """Yields the parts of a tensor that contain values between these positions."""
        tensor = self._tensors[name]
        for parts in tensor.parts:
            own_begins, own_ends = (tuple(at[dim] for dim in parts.dims) for at in (begins, ends))
            shape = parts.shape(tensor.shape)
            for rank, *offsets in parts.within(own_begins, own_ends):
                offset = _replaced((0,) * len(shape), parts.dims, offsets)
                yield self._part(name, shard_file(self._section, rank), rank, offset, shape)

    def file(self, name: str) -> StoredFile:
        """Returns the size and the checksums of a file in which `parts` has found a part."""
        return self._headers[name][0]

    def check_sizes(self) -> None:
        """Raises DamagedSnapshotError if a file of this section is missing or has the wrong size."""
        for rank, file in enumerate(self._files):
            if file is not None:
                check_size(self.path / shard_file(self._section, rank), file.num_bytes)

    def _part(self, name: str, file: str, rank: int, offset: tuple[int, ...], shape: tuple[int, ...]) -> Part:
        if file not in self._headers:
            self._headers[file] = self._read_header(file, rank)
        stored, layout = self._headers[file]
        if name not in layout or layout[name][1:] != (shape, self._tensors[name].dtype):
            raise DamagedSnapshotError(f"{self.path / file} does not contain its part of {name}")
        return Part(file, stored.begin + layout[name][0], offset, shape)

    def _read_header(self, file: str, rank: int) -> tuple[StoredFile, Mapping[str, _Shard]]:
        """Returns the checksums of a file, and the position, shape and data type of each of its shards."""
        if (written := self._files[rank]) is None:
            raise DamagedSnapshotError(f"{self.path / 'snapshot.json'} has no entry for {file}")
        header = read_header(self.path / file, written)
        layout: Mapping[str, _Shard] = {
            name: (header.begins[name], *spec) for name, spec in header.specs.items()
        }
        # Most ranks have shards of the same shapes: one layout is kept for all of them.
        layout = self._layouts.setdefault(tuple(layout.items()), layout)
        return StoredFile(written.num_bytes, header.chunk_bytes, header.chunks, written.header_bytes), layout


def read_header(path: Path, written: WrittenShards) -> Header:
    """Reads and verifies the header of a file with shards.

    Raises:
        DamagedSnapshotError: the file is missing or has the wrong size, or its header is damaged.
    """
    check_size(path, written.num_bytes)
    content = read_beginning(path, min(written.header_bytes, written.num_bytes), written.sha256)
    try:
        return parse_header(content, written.num_bytes)
    except _INVALID as error:
        raise DamagedSnapshotError(f"{path} has an invalid header") from error
