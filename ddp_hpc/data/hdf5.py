"""Reads HDF5 files with two datasets of samples, written by data_gen or by any other program.

Contiguous data is read through a memory map. Chunked, compressed or converted data is read
by h5py, with the sample numbers of a batch in sorted order. The file is opened read-only and
without HDF5's lock: a finished file is never written to, and some parallel file systems
refuse the lock.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from ddp_hpc.base.data_file_layout import ATTR_DTYPE, ATTR_NUM_CLASSES, BFLOAT16
from ddp_hpc.base.errors import DataError
from ddp_hpc.data.file_arrays import Access, check_array, combine, keys_of, read_num_classes, wanted_keys
from ddp_hpc.data.memory_mapped import ArrayPlace, FileIdentity, OpenFile, check_within, open_mapped
from ddp_hpc.data.samples import ArrayInfo, Gather, OpenArrays, Samples, first_line

# The exceptions that h5py raises for damaged files, depending on the kind of damage.
_H5PY_ERRORS = (
    OSError,
    RuntimeError,
    KeyError,
    ValueError,
    TypeError,
    AttributeError,
    OverflowError,
    MemoryError,
)
# In arrays without compression, samples within this many bytes of each other are read in one call.
_MERGE_BYTES = 256 * 1024
# Size of HDF5's chunk cache for each array, in each process.
_CACHE_BYTES = 128 * 1024 * 1024
# Upper limit of the chunk cache, for files whose chunks need more than _CACHE_BYTES.
_MAX_CACHE_BYTES = 256 * 1024 * 1024
_MAX_SLOTS = 1_000_003


def open_hdf5(path: Path, src_key: str, tgt_key: str) -> Samples:
    """Opens the samples of an HDF5 file. The samples in its group `test/`, if any, become `Samples.test`.

    Raises:
        DataError: the file cannot be used for training.
    """
    identity = FileIdentity.of(path)
    with _opened(path) as file:
        names = [key for key in keys_of(src_key, tgt_key) if isinstance(_get(file, key), h5py.Dataset)]
        if not {src_key, tgt_key} <= {*names}:
            names = []
            file.visititems(lambda name, item: names.append(name) if isinstance(item, h5py.Dataset) else None)
        keys = wanted_keys(path, names, src_key, tgt_key)
        infos = {key: _check(path, key, file[key]) for key in keys}
        num_classes = _num_classes(path, file)
        return combine(path, infos, num_classes, lambda src, tgt: _access(path, identity, file, src, tgt))


def _access(path: Path, identity: FileIdentity, file: Any, src: ArrayInfo, tgt: ArrayInfo) -> Access:
    datasets = file[src.key], file[tgt.key]
    other_files = any(map(partial(_uses_other_files, path), datasets))
    offsets = [_raw_offset(dataset) for dataset in datasets]
    if not other_files and offsets[0] is not None and offsets[1] is not None:
        places = ArrayPlace(src, offsets[0]), ArrayPlace(tgt, offsets[1])
        for place in places:
            check_within(path, identity, place)
        return Access("hdf5 memory map", partial(open_mapped, path, identity, *places))
    for dataset in datasets:
        _check_filters(path, dataset)
    plans = _ReadPlan.of(datasets[0], src), _ReadPlan.of(datasets[1], tgt)
    return Access("hdf5 chunked", partial(_open_chunked, path, identity, *plans))


def _file(path: Path, **options: int) -> Any:
    try:
        return h5py.File(path, "r", locking=False, **options)
    except OSError as error:
        if "file locking flag values don't match" not in str(error):
            raise
        # The caller has opened the file with a lock, and HDF5 requires the same flag for all handles in a
        # process.
        return h5py.File(path, "r", **options)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Opens the file, and converts any exception of h5py to a DataError of one line."""
    try:
        with _file(path) as file:
            yield file
    except _H5PY_ERRORS as error:
        text = first_line(error)
        hint = "copy or write it again"
        if re.search(r"\block", text):  # the message about a truncated file contains `sblock`
            hint = "reading needs no lock: export HDF5_USE_FILE_LOCKING=FALSE"
        raise DataError(f"{path} is not a valid HDF5 file, or cannot be read: {text}; {hint}") from None


def _get(file: Any, key: str) -> Any:
    """Returns the object of that name, or None if it does not exist or is a dangling link."""
    try:
        return file[key]
    except KeyError:
        return None


def _check(path: Path, key: str, dataset: Any) -> ArrayInfo:
    # The key is used in messages, since a dataset that is reached through a link may have another name.
    try:
        dtype = dataset.dtype
    except TypeError as error:
        raise DataError(
            f"{path}: {key} has a type that NumPy does not support ({first_line(error)}); write the "
            "dataset as float32"
        ) from None
    bfloat16 = dtype == np.uint16 and _text(dataset.attrs.get(ATTR_DTYPE)) == BFLOAT16
    return check_array(path, key, dataset.shape, dtype, bfloat16)


def _text(value: object) -> object:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _num_classes(path: Path, file: Any) -> int | None:
    value = file.attrs.get(ATTR_NUM_CLASSES)
    # Some programs write an array of one element.
    return read_num_classes(
        path, value.item() if isinstance(value, np.ndarray) and value.size == 1 else value
    )


def _raw_offset(dataset: Any) -> int | None:
    """Returns the offset of values stored as plain bytes of a native type, or None if h5py must read them."""
    creation = dataset.id.get_create_plist()
    if (
        creation.get_layout() != h5py.h5d.CONTIGUOUS
        or creation.get_external_count()
        or not dataset.dtype.isnative
        or dataset.dtype.kind == "b"
        # HDF5 has float types that NumPy does not support; h5py converts them as it reads.
        or not dataset.id.get_type().equal(h5py.h5t.py_create(dataset.dtype))
    ):
        return None
    offset: int | None = dataset.id.get_offset()
    return offset


def _uses_other_files(path: Path, dataset: Any) -> bool:
    """Returns whether some of the values are stored in other files.

    Raises:
        DataError: a source of a virtual dataset is missing: HDF5 would read zeros instead of its values.
    """
    if dataset.is_virtual:
        names = {source.file_name for source in dataset.virtual_sources()} - {"."}
        directories = [os.environ.get("HDF5_VDS_PREFIX", ""), str(path.parent), "."]
        for name in sorted(names):
            # A name that contains % is a pattern for file names, which may not match any file.
            if "%" not in name and not any(Path(directory, name).exists() for directory in directories):
                raise DataError(
                    f"{path}: {dataset.name} is a virtual dataset, and its source file {name} is missing. "
                    "Copy that file too, or merge the data into one file with `python -m data_gen convert`."
                )
        return bool(names)
    if dataset.id.get_create_plist().get_external_count():
        return True
    # If a dataset is reached through an external link, its offset refers to the other file.
    return not path.samefile(dataset.file.filename)


def _check_filters(path: Path, dataset: Any) -> None:
    creation = dataset.id.get_create_plist()
    # Only chunked data has filters, and HDF5 raises an error when asked for those of virtual data.
    if creation.get_layout() != h5py.h5d.CHUNKED:
        return
    for number in range(creation.get_nfilters()):
        code, _, _, name = creation.get_filter(number)
        if not h5py.h5z.filter_avail(code):
            raise DataError(
                f"{path}: {dataset.name} is compressed with filter {code} ({name.decode(errors='replace')}), "
                "which this HDF5 library does not have. Set HDF5_PLUGIN_PATH to the directory of the filter "
                "plugin, or write the data uncompressed."
            )


@dataclass(frozen=True)
class _ReadPlan:
    """Parameters for reading one array with h5py."""

    info: ArrayInfo
    rows: int
    """Number of consecutive samples read in one call, so that a batch decompresses each chunk only once."""
    cache_bytes: int
    """Size of the chunk cache. A chunk that does not fit is decompressed again for each of its samples."""
    cache_slots: int

    @classmethod
    def of(cls, dataset: Any, info: ArrayInfo) -> _ReadPlan:
        sample_bytes = max(1, dataset.nbytes // info.num_samples)
        rows = max(1, _MERGE_BYTES // sample_bytes)
        if dataset.chunks is None:
            return cls(info, rows, 0, 1)
        chunk_bytes = prod(dataset.chunks) * dataset.dtype.itemsize
        across = prod(-(-size // chunk) for size, chunk in zip(info.shape, dataset.chunks[1:], strict=True))
        along = -(-info.num_samples // dataset.chunks[0])
        row_bytes = across * chunk_bytes
        # A row of chunks contains complete samples. Sequential order needs two rows in the cache, and random
        # order needs all of them.
        cache_bytes = min(max(min(2 * row_bytes, _MAX_CACHE_BYTES), _CACHE_BYTES), along * row_bytes)
        # The manual of H5Pset_chunk_cache recommends 100 slots per chunk, so that chunks do not evict each
        # other.
        slots = min(100 * max(1, cache_bytes // chunk_bytes), _MAX_SLOTS) | 1
        has_filters = dataset.id.get_create_plist().get_nfilters() > 0
        # A part of an uncompressed chunk can be read, so the size of the chunk does not matter.
        whole = max(1, _MAX_CACHE_BYTES // sample_bytes) if has_filters else rows
        return cls(info, min(whole, dataset.chunks[0]), cache_bytes, slots)


def _open_chunked(path: Path, identity: FileIdentity, src: _ReadPlan, tgt: _ReadPlan) -> OpenArrays:
    with ExitStack() as stack:
        opened = OpenFile.open(path, identity)
        stack.callback(opened.file.close)
        try:
            slots = max(src.cache_slots, tgt.cache_slots)
            file = _file(path, rdcc_nbytes=max(src.cache_bytes, tgt.cache_bytes), rdcc_nslots=slots)
            stack.callback(file.close)
            gathers = [_gather_chunked(path, file[plan.info.key], plan) for plan in (src, tgt)]
        except _H5PY_ERRORS as error:
            raise DataError(f"{path} cannot be reopened: {first_line(error)}; restart the program") from None
        return OpenArrays(gathers[0], gathers[1], check=opened.check, close=stack.pop_all().close)


def _gather_chunked(path: Path, dataset: Any, plan: _ReadPlan) -> Gather:
    def gather(indices: NDArray[np.int64], out: NDArray[Any]) -> None:
        try:
            if len(indices) and bool((np.diff(indices) == 1).all()):
                dataset.read_direct(out, np.s_[indices[0] : indices[-1] + 1])
            else:
                scatter(indices, out)
        except _H5PY_ERRORS as error:
            raise DataError(
                f"{path}: samples of {plan.info.key} cannot be read: {first_line(error)}; "
                "copy or write the file again"
            ) from None

    def scatter(indices: NDArray[np.int64], out: NDArray[Any]) -> None:
        order = np.argsort(indices)
        in_order = indices[order]
        cuts = np.flatnonzero(np.diff(in_order // plan.rows)) + 1
        for group, rows in zip(np.split(in_order, cuts), np.split(order, cuts), strict=True):
            if len(group):
                # A plain slice takes h5py's fast path in C; a call of read_direct costs several times as
                # much.
                out[rows] = dataset[int(group[0]) : int(group[-1]) + 1][group - group[0]]

    return gather
