"""Creates files with space for their arrays in each format, and reads the metadata of existing files.

A file is first created with its metadata and empty space for the values. The same code then
writes the values to all formats, at byte offsets and in chunks, so that arrays of any size need
little memory.
"""

from __future__ import annotations

import json
import struct
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from math import prod
from pathlib import Path
from typing import IO, Any

from data_gen.recipe import DTYPE_BYTES, canonical_json, fingerprint
from ddp_hpc.base import data_file_layout
from ddp_hpc.base.errors import DataError, RequestError, nearest
from ddp_hpc.base.version import __version__
from ddp_hpc.data.open_file import open_samples
from ddp_hpc.data.samples import ArrayInfo, Samples, first_line

_OTHER = {"bool": 1, "int8": 1, "uint8": 1, "int16": 2, "uint16": 2, "int32": 4, "uint32": 4, "int64": 8}
ITEM_BYTES = {**DTYPE_BYTES, **_OTHER, "uint64": 8}
# Maximum number of characters quoted from a library's error message.
_MAX_REASON = 200
# The page size, to which memory-mapped arrays and direct I/O must be aligned.
_ALIGNMENT = 4096
# Size of the fixed part of a local header in the zip format.
_LOCAL_BYTES = 30
# The only attributes read from an HDF5 file; others may have types that NumPy does not support.
_MARKS = (data_file_layout.ATTR_RECIPE, data_file_layout.ATTR_FINGERPRINT)


class ForeignFileError(Exception):
    """The file was not written by data_gen or is damaged; the message is the reason."""


@dataclass(frozen=True)
class Array:
    """One array of a file. `name` is its key, and the first axis of `shape` is the sample axis."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        """The size of the values in bytes."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Contents:
    """The description of a file to write, without the values."""

    arrays: tuple[Array, ...]
    recipe: Mapping[str, object]
    """Everything that determines the values, as JSON types; its fingerprint identifies the contents."""
    attributes: Mapping[str, int | str]
    """Additional metadata: seed, num_classes, source."""

    @property
    def num_bytes(self) -> int:
        """The total size of all values in bytes."""
        return sum(array.num_bytes for array in self.arrays)


def format_of(path: Path) -> str:
    """Returns the suffix of `path`, which determines its format.

    Raises:
        RequestError: the format is not supported.
    """
    suffix = path.suffix.lower()
    if suffix not in data_file_layout.SUFFIXES:
        hint = nearest(suffix, data_file_layout.SUFFIXES)
        raise RequestError(
            f"{path}: unknown suffix {suffix!r}{hint}; use one of {' '.join(data_file_layout.SUFFIXES)}"
        )
    return suffix


def plain_text(text: str) -> str:
    """Returns text that all formats can store: file names need not be UTF-8, and HDF5 stops at a NUL."""
    return text.encode("utf-8", "replace").decode().replace("\0", "")


def lay_out(path: Path, suffix: str, contents: Contents) -> dict[str, int]:
    """Writes everything except the values to the file, and returns the byte offset of each array."""
    marks: dict[str, int | str] = {
        data_file_layout.ATTR_FORMAT_VERSION: data_file_layout.FORMAT_VERSION,
        data_file_layout.ATTR_GENERATOR: f"ddp-hpc data_gen {__version__}",
        # The time of day is omitted, so that files that are written from the same recipe on the same day are
        # identical.
        data_file_layout.ATTR_CREATED: datetime.now(UTC).date().isoformat(),
        data_file_layout.ATTR_RECIPE: canonical_json(contents.recipe),
        data_file_layout.ATTR_FINGERPRINT: fingerprint(contents.recipe),
        **contents.attributes,
    }
    if suffix == data_file_layout.PT_SUFFIX:
        return _lay_out_pt(path, contents.arrays, marks)
    if suffix == data_file_layout.SAFETENSORS_SUFFIX:
        return _lay_out_safetensors(path, contents.arrays, marks)
    return _lay_out_hdf5(path, contents.arrays, marks)


def read_stamp(path: Path, suffix: str) -> tuple[Mapping[str, object], tuple[Array, ...]]:
    """Returns the recipe of an existing file and the descriptions of its arrays, without reading the values.

    Raises:
        ForeignFileError: the file was not written by data_gen, or it is damaged.
    """
    try:
        marks = _read_marks(path, suffix)
    # The libraries can raise almost any exception for a damaged file.
    except Exception as error:
        raise ForeignFileError(f"it cannot be read: {first_line(error)[:_MAX_REASON]}") from None
    try:
        recipe = dict(json.loads(str(marks[data_file_layout.ATTR_RECIPE])))
        is_own = fingerprint(recipe) == marks[data_file_layout.ATTR_FINGERPRINT]
    except (KeyError, ValueError, TypeError, RecursionError):
        is_own = False
    if not is_own:
        raise ForeignFileError("it has no recipe with a fingerprint that matches")
    try:
        infos = infos_of(open_samples(path))
    except DataError as error:
        raise ForeignFileError(str(error)) from None
    return recipe, tuple(
        Array(name, (info.num_samples, *info.shape), info.dtype_name) for name, info in infos.items()
    )


def infos_of(samples: Samples) -> dict[str, ArrayInfo]:
    """Returns the descriptions of the arrays by the names that they have in a written file."""
    infos = {data_file_layout.SRC: samples.src, data_file_layout.TGT: samples.tgt}
    if samples.test:
        infos |= {data_file_layout.TEST_SRC: samples.test.src, data_file_layout.TEST_TGT: samples.test.tgt}
    return infos


def _read_marks(path: Path, suffix: str) -> dict[str, Any]:
    """Reads the metadata of a file, at least the keys in `_MARKS`, without its arrays."""
    if suffix == data_file_layout.PT_SUFFIX:
        import torch

        return dict(torch.load(path, weights_only=True, mmap=True, map_location="cpu"))
    if suffix == data_file_layout.SAFETENSORS_SUFFIX:
        from safetensors import safe_open

        with safe_open(path, framework="np") as file:
            return file.metadata() or {}
    import h5py

    marks = {}
    with h5py.File(path, "r", locking=False) as file:
        for mark in _MARKS:
            with suppress(KeyError, TypeError):
                marks[mark] = file.attrs[mark]
    return marks


def _lay_out_hdf5(path: Path, arrays: tuple[Array, ...], marks: Mapping[str, int | str]) -> dict[str, int]:
    import h5py
    import numpy as np

    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_layout(h5py.h5d.CONTIGUOUS)
    # Early allocation fixes the offset at which the values are written later; no fill value is written.
    plist.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    plist.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    plist.set_obj_track_times(False)
    offsets = {}
    # No lock is needed, since no other process knows the name, and some parallel file systems refuse flock.
    with h5py.File(
        path, "w", locking=False, alignment_threshold=_ALIGNMENT, alignment_interval=_ALIGNMENT
    ) as file:
        file.attrs.update(marks)
        for array in arrays:
            group = file.require_group(Path("/", array.name).parent.as_posix())
            is_bfloat16 = array.dtype == data_file_layout.BFLOAT16
            dtype = h5py.h5t.py_create(np.dtype("uint16" if is_bfloat16 else array.dtype))
            space = h5py.h5s.create_simple(array.shape)
            dataset = h5py.h5d.create(group.id, Path(array.name).name.encode(), dtype, space, plist)
            offsets[array.name] = int(dataset.get_offset())
            if is_bfloat16:
                file[array.name].attrs[data_file_layout.ATTR_DTYPE] = data_file_layout.BFLOAT16
    return offsets


def _lay_out_pt(path: Path, arrays: tuple[Array, ...], marks: Mapping[str, int | str]) -> dict[str, int]:
    import torch

    # The values of these tensors are never accessed, so they take no physical memory.
    tensors = {array.name: torch.empty(array.shape, dtype=getattr(torch, array.dtype)) for array in arrays}
    # If given a path, torch would write its temporary name into the file.
    with torch.serialization.skip_data(), path.open("wb") as new:
        torch.save({**tensors, **marks}, new)
    offsets = {}
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        # torch numbers the storages in the order of the dict. Their CRC-32 fields remain
        # those of the skipped data: torch.load ignores them, but unzip checks them.
        members = {Path(info.filename).parts[1:]: info for info in archive.infolist()}
        for number, array in enumerate(arrays):
            offsets[array.name] = _member_start(file, members["data", str(number)])
    return offsets


def _member_start(file: IO[bytes], info: zipfile.ZipInfo) -> int:
    """Returns the offset of the first byte of an uncompressed member in a zip file."""
    file.seek(info.header_offset)
    # The last four bytes of the local header are the lengths of the name and the extra field that follow it.
    name_bytes, extra_bytes = struct.unpack("<26x2H", file.read(_LOCAL_BYTES))
    return info.header_offset + _LOCAL_BYTES + int(name_bytes) + int(extra_bytes)


def _lay_out_safetensors(
    path: Path, arrays: tuple[Array, ...], marks: Mapping[str, int | str]
) -> dict[str, int]:
    # The format is the length of the header in 8 bytes, a JSON header with text metadata, and the arrays
    # without gaps.
    header: dict[str, object] = {"__metadata__": {key: str(value) for key, value in marks.items()}}
    starts = {}
    end = 0
    # Arrays with larger items come first, so that each array is aligned to its item size.
    for array in sorted(arrays, key=lambda array: -ITEM_BYTES[array.dtype]):
        starts[array.name], end = end, end + array.num_bytes
        header[array.name] = {
            "dtype": data_file_layout.SAFETENSORS_DTYPES[array.dtype],
            "shape": array.shape,
            "data_offsets": [starts[array.name], end],
        }
    encoded = json.dumps(header).encode()
    encoded += b" " * (-(8 + len(encoded)) % _ALIGNMENT)
    data_start = 8 + len(encoded)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        file.truncate(data_start + end)
    return {name: data_start + start for name, start in starts.items()}
