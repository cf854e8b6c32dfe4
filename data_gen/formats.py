"""The file formats: lay a file out with room for its arrays, and read back what such a file claims to be.

Laying out and filling are two steps, so that every format is filled by the same
plain writes at byte offsets, a piece at a time, whatever the size of an array.
"""

from __future__ import annotations

import json
import os
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from math import prod
from pathlib import Path
from typing import Any

from data_gen.recipe import canonical_json, fingerprint
from ddp_hpc import __version__, h5_layout
from ddp_hpc.errors import RequestError, nearest

ITEM_BYTES = {"float16": 2, "float32": 4, "float64": 8, "int64": 8}
# Names of the safetensors format, https://huggingface.co/docs/safetensors.
_SAFETENSORS_DTYPES = {"float16": "F16", "float32": "F32", "float64": "F64", "int64": "I64"}
# A page: mapped arrays start on one, and so do writes that skip the page cache.
_ALIGNMENT = 4096
_ARRAY_NAMES = (h5_layout.SRC, h5_layout.TGT, h5_layout.TEST_SRC, h5_layout.TEST_TGT)


class ForeignFileError(Exception):
    """The file was not written by data_gen, or it is damaged; the text says how that shows."""


@dataclass(frozen=True)
class Array:
    """One array of a file: `name` is a key, `shape` begins with the axis of samples."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        """Bytes of the values."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Contents:
    """What a file is to hold, without the values."""

    arrays: tuple[Array, ...]
    recipe: Mapping[str, object]
    """All that decides the values, as JSON types; its fingerprint tells files apart."""
    attributes: Mapping[str, int | str]
    """More for people and readers: seed, num_classes, source."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all values together."""
        return sum(array.num_bytes for array in self.arrays)


@dataclass(frozen=True)
class Stamp:
    """What a file that is there says of itself."""

    recipe: Mapping[str, object]
    arrays: tuple[Array, ...]
    end: int
    """Bytes that the file must have for its arrays to be in it."""


def format_of(path: Path) -> str:
    """The suffix of `path`, which names its format.

    Raises:
        RequestError: for a suffix that is none of the formats.
    """
    suffix = path.suffix.lower()
    if suffix not in h5_layout.SUFFIXES:
        hint = nearest(suffix, h5_layout.SUFFIXES)
        raise RequestError(
            f"{path}: the suffix {suffix!r} names no format{hint}; use one of {' '.join(h5_layout.SUFFIXES)}"
        )
    return suffix


def lay_out(path: Path, suffix: str, contents: Contents) -> dict[str, int]:
    """The byte offset of each array in the new file `path`, which has everything but their values."""
    marks: dict[str, int | str] = {
        h5_layout.ATTR_FORMAT_VERSION: h5_layout.FORMAT_VERSION,
        h5_layout.ATTR_GENERATOR: f"ddp-hpc data_gen {__version__}",
        h5_layout.ATTR_CREATED: datetime.now(UTC).isoformat(timespec="seconds"),
        h5_layout.ATTR_RECIPE: canonical_json(contents.recipe),
        h5_layout.ATTR_FINGERPRINT: fingerprint(contents.recipe),
        **contents.attributes,
    }
    if suffix == h5_layout.PT_SUFFIX:
        return _lay_out_pt(path, contents.arrays, marks)
    if suffix == h5_layout.SAFETENSORS_SUFFIX:
        return _lay_out_safetensors(path, contents.arrays, marks)
    return _lay_out_hdf5(path, contents.arrays, marks)


def read_stamp(path: Path, suffix: str) -> Stamp:
    """What the existing file `path` claims to hold, without reading the arrays.

    Raises:
        ForeignFileError: where it is no file of data_gen's, or a damaged one.
    """
    if suffix == h5_layout.PT_SUFFIX:
        marks, arrays, end = _read_pt(path)
    elif suffix == h5_layout.SAFETENSORS_SUFFIX:
        marks, arrays, end = _read_safetensors(path)
    else:
        marks, arrays, end = _read_hdf5(path)
    try:
        recipe = json.loads(str(marks[h5_layout.ATTR_RECIPE]))
        if fingerprint(recipe) != marks[h5_layout.ATTR_FINGERPRINT]:
            raise ForeignFileError("its recipe and its fingerprint disagree")
    except KeyError as error:
        raise ForeignFileError(f"it has no {error.args[0]}") from error
    except (ValueError, AttributeError) as error:
        raise ForeignFileError("its recipe is not JSON") from error
    return Stamp(recipe, arrays, end)


def _lay_out_hdf5(path: Path, arrays: tuple[Array, ...], marks: Mapping[str, int | str]) -> dict[str, int]:
    import h5py
    import numpy as np

    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_layout(h5py.h5d.CONTIGUOUS)
    # The place is fixed now and the fill value never written: the offset is what we fill at.
    plist.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    plist.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    offsets = {}
    # No lock: nobody else knows the name, and some parallel file systems refuse flock.
    with h5py.File(
        path, "w", locking=False, alignment_threshold=_ALIGNMENT, alignment_interval=_ALIGNMENT
    ) as file:
        file.attrs.update(marks)
        for array in arrays:
            group = file.require_group(Path("/", array.name).parent.as_posix())
            dtype = h5py.h5t.py_create(np.dtype(array.dtype))
            space = h5py.h5s.create_simple(array.shape)
            dataset = h5py.h5d.create(group.id, Path(array.name).name.encode(), dtype, space, plist)
            offsets[array.name] = int(dataset.get_offset())
    return offsets


def _read_hdf5(path: Path) -> tuple[dict[str, Any], tuple[Array, ...], int]:
    import h5py

    try:
        with h5py.File(path, "r", locking=False) as file:
            marks = dict(file.attrs)
            found = [(name, file[name]) for name in _ARRAY_NAMES if isinstance(file.get(name), h5py.Dataset)]
            arrays = tuple(Array(name, tuple(data.shape), data.dtype.name) for name, data in found)
            end = max(((data.id.get_offset() or 0) + data.nbytes for _, data in found), default=0)
    # A damaged file raises nearly anything out of h5py.
    except (OSError, RuntimeError, KeyError, ValueError, TypeError, AttributeError) as error:
        raise ForeignFileError(f"h5py cannot read it: {error}") from error
    return marks, arrays, end


def _lay_out_pt(path: Path, arrays: tuple[Array, ...], marks: Mapping[str, int | str]) -> dict[str, int]:
    import torch

    # Never touched, so the pages of these tensors are never taken.
    tensors = {array.name: torch.empty(array.shape, dtype=getattr(torch, array.dtype)) for array in arrays}
    with torch.serialization.skip_data():
        torch.save({**tensors, **marks}, path)
    offsets = {}
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        # torch numbers the storages in the order of the dict. Their CRC-32 fields stay
        # those of the skipped data: torch.load does not look at them, unzip does.
        members = {Path(info.filename).parts[1:]: info for info in archive.infolist()}
        for number, array in enumerate(arrays):
            info = members["data", str(number)]
            file.seek(info.header_offset)
            # The zip format's local header: 30 bytes, the last four the lengths of name and extra field.
            name_bytes, extra_bytes = struct.unpack("<26x2H", file.read(30))
            offsets[array.name] = info.header_offset + 30 + name_bytes + extra_bytes
    return offsets


def _read_pt(path: Path) -> tuple[dict[str, Any], tuple[Array, ...], int]:
    import pickle

    import torch

    try:
        entries = torch.load(path, weights_only=True, mmap=True, map_location="cpu")
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        raise ForeignFileError(f"torch.load cannot read it: {str(error).splitlines()[0]}") from error
    if not isinstance(entries, dict):
        raise ForeignFileError("it holds no dict")
    arrays = tuple(
        Array(name, tuple(entries[name].shape), str(entries[name].dtype).removeprefix("torch."))
        for name in _ARRAY_NAMES
        if isinstance(entries.get(name), torch.Tensor)
    )
    # A zip file ends in its directory: torch.load cannot open one that was cut.
    return entries, arrays, 0


def _lay_out_safetensors(
    path: Path, arrays: tuple[Array, ...], marks: Mapping[str, int | str]
) -> dict[str, int]:
    # The format: the header's length in 8 bytes, a JSON header, the arrays without gaps; metadata is text.
    header: dict[str, object] = {"__metadata__": {key: str(value) for key, value in marks.items()}}
    starts = {}
    end = 0
    for array in arrays:
        starts[array.name], end = end, end + array.num_bytes
        header[array.name] = {
            "dtype": _SAFETENSORS_DTYPES[array.dtype],
            "shape": array.shape,
            "data_offsets": [starts[array.name], end],
        }
    encoded = json.dumps(header).encode()
    encoded += b" " * (-(8 + len(encoded)) % _ALIGNMENT)
    behind_header = 8 + len(encoded)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        file.truncate(behind_header + end)
    return {name: behind_header + start for name, start in starts.items()}


def _read_safetensors(path: Path) -> tuple[dict[str, Any], tuple[Array, ...], int]:
    numpy_names = {theirs: ours for ours, theirs in _SAFETENSORS_DTYPES.items()}
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > os.fstat(file.fileno()).st_size:
                raise ForeignFileError("its header is longer than the file")
            header = json.loads(file.read(length))
        marks = header.pop("__metadata__", {})
        arrays = tuple(
            Array(name, tuple(header[name]["shape"]), numpy_names.get(header[name]["dtype"], "other"))
            for name in _ARRAY_NAMES
            if name in header
        )
        end = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
        return dict(marks), arrays, end
    except (OSError, struct.error, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ForeignFileError("its safetensors header cannot be read") from error
