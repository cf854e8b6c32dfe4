"""The file formats: lay a file out with room for its arrays, and read back what such a file claims to be.

Laying out and filling are two steps, so that every format is filled by the same
plain writes at byte offsets, a piece at a time, whatever the size of an array.
"""

from __future__ import annotations

import json
import struct
import zipfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from math import prod
from pathlib import Path
from typing import Any

from data_gen import array_files
from data_gen.array_streams import npz_keys, open_npz_array, read_npz_marks
from data_gen.recipe import DTYPE_BYTES, canonical_json, fingerprint
from ddp_hpc import __version__, h5_layout
from ddp_hpc.data.formats import open_samples
from ddp_hpc.data.samples import first_line
from ddp_hpc.errors import DataError, RequestError, nearest

ITEM_BYTES = {**DTYPE_BYTES, "bool": 1, "int8": 1, "uint16": 2, "uint32": 4, "uint64": 8}
# Names of the safetensors format, https://huggingface.co/docs/safetensors.
_SAFETENSORS_DTYPES = {
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "bool": "BOOL",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
}
# Of a library's text.
_MAX_SAID = 200
# A page: mapped arrays start on one, and so do writes that skip the page cache.
_ALIGNMENT = 4096
ARRAY_NAMES = (h5_layout.SRC, h5_layout.TGT, h5_layout.TEST_SRC, h5_layout.TEST_TGT)
# All that is read of an HDF5 file's attributes: others may have types that NumPy lacks.
_MARKS = (
    h5_layout.ATTR_RECIPE,
    h5_layout.ATTR_FINGERPRINT,
    h5_layout.ATTR_NUM_CLASSES,
    h5_layout.ATTR_SOURCE,
)


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


def format_of(path: Path, suffixes: Sequence[str] = h5_layout.SUFFIXES) -> str:
    """The suffix of `path`, which names its format.

    Raises:
        RequestError: for a suffix that is none of `suffixes`.
    """
    suffix = path.suffix.lower()
    if suffix not in suffixes:
        hint = nearest(suffix, tuple(suffixes))
        raise RequestError(
            f"{path}: the suffix {suffix!r} names no format{hint}; use one of {' '.join(suffixes)}"
        )
    return suffix


def plain_text(text: str) -> str:
    """The text as all formats can keep it: file names need not be UTF-8, and HDF5 ends a text at a NUL."""
    return text.encode("utf-8", "replace").decode().replace("\0", "")


def lay_out(path: Path, suffix: str, contents: Contents) -> dict[str, int]:
    """The byte offset of each array in the new file `path`, which has everything but their values.

    An empty file that is there is filled, not replaced: it may lie on its disks by a plan.
    Once it is filled, `seal` completes it.
    """
    if suffix == array_files.NPZ_SUFFIX:
        return array_files.lay_out_npz(path, contents.arrays)
    if suffix in array_files.SINGLE_SUFFIXES:
        (array,) = contents.arrays
        return array_files.lay_out_single(path, suffix, array)
    marks: dict[str, int | str] = {
        h5_layout.ATTR_FORMAT_VERSION: h5_layout.FORMAT_VERSION,
        h5_layout.ATTR_GENERATOR: f"ddp-hpc data_gen {__version__}",
        # The day alone: files of one recipe are the same byte for byte, whoever wrote them that day.
        h5_layout.ATTR_CREATED: datetime.now(UTC).date().isoformat(),
        h5_layout.ATTR_RECIPE: canonical_json(contents.recipe),
        h5_layout.ATTR_FINGERPRINT: fingerprint(contents.recipe),
        **contents.attributes,
    }
    if suffix == h5_layout.PT_SUFFIX:
        return _lay_out_pt(path, contents.arrays, marks)
    if suffix == h5_layout.SAFETENSORS_SUFFIX:
        return _lay_out_safetensors(path, contents.arrays, marks)
    return _lay_out_hdf5(path, contents.arrays, marks)


def seal(path: Path, suffix: str, contents: Contents) -> None:
    """Adds to the filled file what follows from the values: the checksums of an .npz file."""
    if suffix == array_files.NPZ_SUFFIX:
        recipe = canonical_json(contents.recipe)
        array_files.seal_npz(path, {h5_layout.ATTR_RECIPE: recipe, **contents.attributes})


def read_stamp(path: Path, suffix: str) -> tuple[Mapping[str, object], tuple[Array, ...]]:
    """The recipe of the existing file `path`, and the arrays that are in it, which are not read.

    Raises:
        ForeignFileError: where it is no file of data_gen's, or a damaged one.
    """
    marks = read_marks(path, suffix)
    try:
        recipe = dict(json.loads(str(marks[h5_layout.ATTR_RECIPE])))
        # The zip file has a checksum of it.
        if suffix != array_files.NPZ_SUFFIX and fingerprint(recipe) != marks[h5_layout.ATTR_FINGERPRINT]:
            raise ForeignFileError("its recipe and its fingerprint disagree")
    except KeyError as error:
        raise ForeignFileError(f"it has no {error.args[0]}") from None
    except (ValueError, TypeError, RecursionError):
        raise ForeignFileError("its recipe is no JSON object") from None
    try:
        return recipe, _arrays(path, suffix)
    except DataError as error:
        raise ForeignFileError(str(error)) from None


def read_marks(path: Path, suffix: str) -> Mapping[str, Any]:
    """What anybody's file says of itself, `_MARKS` at least; nothing of its arrays.

    Raises:
        ForeignFileError: where the file is damaged, or of a format that says nothing.
    """
    if suffix in array_files.SINGLE_SUFFIXES:
        raise ForeignFileError(f"{suffix} files do not say what they were made from")
    try:
        if suffix == array_files.NPZ_SUFFIX:
            return read_npz_marks(path)
        if suffix == h5_layout.PT_SUFFIX:
            import torch

            return dict(torch.load(path, weights_only=True, mmap=True, map_location="cpu"))
        if suffix == h5_layout.SAFETENSORS_SUFFIX:
            from safetensors import safe_open

            with safe_open(path, framework="np") as file:
                return file.metadata() or {}
        return _read_hdf5_marks(path)
    # A damaged file raises nearly anything out of the libraries.
    except Exception as error:
        raise ForeignFileError(f"it cannot be read: {first_line(error)[:_MAX_SAID]}") from None


def _read_hdf5_marks(path: Path) -> dict[str, Any]:
    import h5py

    marks = {}
    with h5py.File(path, "r", locking=False) as file:
        for mark in _MARKS:
            with suppress(KeyError, TypeError):
                marks[mark] = file.attrs[mark]
    return marks


def _arrays(path: Path, suffix: str) -> tuple[Array, ...]:
    """The arrays that are there, each whole."""
    if suffix == array_files.NPZ_SUFFIX:
        keys = npz_keys(path)
        infos = [open_npz_array(path, name).info for name in ARRAY_NAMES if name in keys]
    else:
        samples = open_samples(path)
        infos = [samples.src, samples.tgt]
        infos += [samples.test.src, samples.test.tgt] if samples.test else []
    return tuple(
        Array(name, (info.num_samples, *info.shape), info.dtype_name)
        for name, info in zip(ARRAY_NAMES, infos, strict=False)
    )


def _lay_out_hdf5(path: Path, arrays: tuple[Array, ...], marks: Mapping[str, int | str]) -> dict[str, int]:
    import h5py
    import numpy as np

    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_layout(h5py.h5d.CONTIGUOUS)
    # The place is fixed now and the fill value never written: the offset is what we fill at.
    plist.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    plist.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    plist.set_obj_track_times(False)
    offsets = {}
    # No lock: nobody else knows the name, and some parallel file systems refuse flock.
    with h5py.File(
        path, "w", locking=False, alignment_threshold=_ALIGNMENT, alignment_interval=_ALIGNMENT
    ) as file:
        file.attrs.update(marks)
        for array in arrays:
            group = file.require_group(Path("/", array.name).parent.as_posix())
            is_bfloat16 = array.dtype == h5_layout.BFLOAT16
            dtype = h5py.h5t.py_create(np.dtype("uint16" if is_bfloat16 else array.dtype))
            space = h5py.h5s.create_simple(array.shape)
            dataset = h5py.h5d.create(group.id, Path(array.name).name.encode(), dtype, space, plist)
            offsets[array.name] = int(dataset.get_offset())
            if is_bfloat16:
                file[array.name].attrs[h5_layout.ATTR_DTYPE] = h5_layout.BFLOAT16
    return offsets


def _lay_out_pt(path: Path, arrays: tuple[Array, ...], marks: Mapping[str, int | str]) -> dict[str, int]:
    import torch

    # Never touched, so the pages of these tensors are never taken.
    tensors = {array.name: torch.empty(array.shape, dtype=getattr(torch, array.dtype)) for array in arrays}
    # Given a path, torch would write its name, which is a passing one, into the file.
    with torch.serialization.skip_data(), path.open("wb") as new:
        torch.save({**tensors, **marks}, new)
    offsets = {}
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        # torch numbers the storages in the order of the dict. Their CRC-32 fields stay
        # those of the skipped data: torch.load does not look at them, unzip does.
        members = {Path(info.filename).parts[1:]: info for info in archive.infolist()}
        for number, array in enumerate(arrays):
            offsets[array.name] = array_files.member_start(file, members["data", str(number)])
    return offsets


def _lay_out_safetensors(
    path: Path, arrays: tuple[Array, ...], marks: Mapping[str, int | str]
) -> dict[str, int]:
    # The format: the header's length in 8 bytes, a JSON header, the arrays without gaps; metadata is text.
    header: dict[str, object] = {"__metadata__": {key: str(value) for key, value in marks.items()}}
    starts = {}
    end = 0
    # The larger items first: so each array begins at a multiple of its items' size.
    for array in sorted(arrays, key=lambda array: -ITEM_BYTES[array.dtype]):
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
