"""HDF5 files: our own and anybody's with two datasets of samples.

Contiguous data is read by memory map; chunked, compressed or converted data by
h5py, one read of sorted numbers a batch. The file is opened read-only and
without HDF5's lock: nobody writes a finished file, and some parallel file
systems refuse the lock.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from ddp_hpc.data.mapped import ArrayPlace, FileIdentity, check_within, open_mapped
from ddp_hpc.data.samples import (
    ArrayInfo,
    Gather,
    OpenArrays,
    Samples,
    check_array,
    check_pair,
    check_test,
    first_line,
)
from ddp_hpc.errors import DataError, nearest
from ddp_hpc.h5_layout import ATTR_NUM_CLASSES, TEST_GROUP

# What h5py raises from a damaged file, by the damage.
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
# Names listed in an error.
_MAX_LISTED = 12


def open_hdf5(path: Path, src_key: str, tgt_key: str) -> Samples:
    """The samples of an HDF5 file; `test` holds those of its group `test/`, where there is one.

    Raises:
        DataError: for every way in which the file is not what training needs.
    """
    identity = FileIdentity.of(path)
    with _opened(path) as file:
        train = _dataset(path, file, src_key, "--src-key"), _dataset(path, file, tgt_key, "--tgt-key")
        num_classes = _num_classes(path, file)
        test_keys = [f"{TEST_GROUP}/{key}" for key in (src_key, tgt_key)]
        # A foreign file may call anything "test".
        has_test = any(isinstance(_get(file, key), h5py.Dataset) for key in test_keys)
        test = tuple(_dataset(path, file, key, None) for key in test_keys) if has_test else ()
        train_info = _check(path, *train)
        test_samples = None
        if test:
            test_info = _check(path, test[0], test[1])
            check_test(path, train_info, test_info)
            test_samples = _samples(path, identity, test_info, (test[0], test[1]), num_classes, None)
        return _samples(path, identity, train_info, train, num_classes, test_samples)


def _samples(
    path: Path,
    identity: FileIdentity,
    infos: tuple[ArrayInfo, ArrayInfo],
    datasets: tuple[Any, Any],
    num_classes: int | None,
    test: Samples | None,
) -> Samples:
    offsets = [_raw_offset(dataset) for dataset in datasets]
    if offsets[0] is not None and offsets[1] is not None:
        places = ArrayPlace(infos[0], offsets[0]), ArrayPlace(infos[1], offsets[1])
        for place in places:
            check_within(path, identity, place)
        reader, open_arrays = "hdf5 memory map", partial(open_mapped, path, identity, *places)
    else:
        for dataset in datasets:
            _check_filters(path, dataset)
        reader, open_arrays = "hdf5 chunked", partial(_open_chunked, path, identity, *infos)
    return Samples(path, *infos, num_classes=num_classes, reader=reader, open_arrays=open_arrays, test=test)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """The open file; whatever h5py raises about it as a DataError of one line."""
    try:
        with h5py.File(path, "r", locking=False) as file:
            yield file
    except _H5PY_ERRORS as error:
        text = first_line(error)
        if "signature not found" in text:
            raise DataError(
                f"{path} is not an HDF5 file, or its first bytes are damaged; write it again"
            ) from error
        seen = "was cut short" if "truncated file" in text else "is damaged"
        raise DataError(f"{path} {seen}: {text}; copy or write it again") from error


def _get(file: Any, key: str) -> Any:
    """What the file has under the key, or None; a link that leads nowhere is nothing."""
    try:
        return file[key]
    except KeyError:
        return None


def _dataset(path: Path, file: Any, key: str, option: str | None) -> Any:
    found = _get(file, key)
    if isinstance(found, h5py.Dataset):
        return found
    seen = "is a group" if isinstance(found, h5py.Group) else "is not there"
    names: list[str] = []
    file.visititems(lambda name, item: names.append(name) if isinstance(item, h5py.Dataset) else None)
    listed = ", ".join(names[:_MAX_LISTED]) + (", ..." if len(names) > _MAX_LISTED else "")
    way_out = f"name one with {option}" if option else "write both datasets of the test split, or none"
    raise DataError(
        f"{path}: the dataset {key!r} {seen}{nearest(key, names)}; "
        f"the file has {listed or 'no dataset'}; {way_out}"
    )


def _check(path: Path, src: Any, tgt: Any) -> tuple[ArrayInfo, ArrayInfo]:
    infos = []
    for dataset in (src, tgt):
        key = dataset.name.lstrip("/")
        try:
            dtype = dataset.dtype
        except TypeError as error:
            raise DataError(
                f"{path}: {key} has a type that NumPy lacks ({first_line(error)}); write it as float32"
            ) from error
        infos.append(check_array(path, key, dataset.shape, dtype))
    check_pair(path, infos[0], infos[1])
    return infos[0], infos[1]


def _num_classes(path: Path, file: Any) -> int | None:
    if ATTR_NUM_CLASSES not in file.attrs:
        return None
    value = np.asarray(file.attrs[ATTR_NUM_CLASSES])
    if value.size != 1 or value.dtype.kind not in "iu" or int(value.reshape(-1)[0]) < 1:
        raise DataError(
            f"{path}: the attribute {ATTR_NUM_CLASSES} is {value!s}; a number of at least 1 is needed"
        )
    return int(value.reshape(-1)[0])


def _raw_offset(dataset: Any) -> int | None:
    """Where the values lie as plain bytes of a native type, or None where h5py has to fetch them."""
    creation = dataset.id.get_create_plist()
    if (
        creation.get_layout() != h5py.h5d.CONTIGUOUS
        or creation.get_external_count()
        or not dataset.dtype.isnative
        or dataset.dtype.kind == "b"
        # HDF5 has float types that NumPy lacks, and h5py converts them as it reads.
        or not dataset.id.get_type().equal(h5py.h5t.py_create(dataset.dtype))
    ):
        return None
    offset: int | None = dataset.id.get_offset()
    return offset


def _check_filters(path: Path, dataset: Any) -> None:
    creation = dataset.id.get_create_plist()
    # Only chunked data has filters, and HDF5 refuses to count those of virtual data.
    if creation.get_layout() != h5py.h5d.CHUNKED:
        return
    for number in range(creation.get_nfilters()):
        code, _, _, name = creation.get_filter(number)
        if not h5py.h5z.filter_avail(code):
            raise DataError(
                f"{path}: {dataset.name} is compressed by filter {code} ({name.decode(errors='replace')}), "
                "which this HDF5 lacks; set HDF5_PLUGIN_PATH to where it is, or write the data uncompressed"
            )


def _open_chunked(path: Path, identity: FileIdentity, src: ArrayInfo, tgt: ArrayInfo) -> OpenArrays:
    identity.check(path)
    try:
        file = h5py.File(path, "r", locking=False)
        return OpenArrays(
            _gather_chunked(path, file[src.key], src), _gather_chunked(path, file[tgt.key], tgt), file.close
        )
    except _H5PY_ERRORS as error:
        raise DataError(f"{path} cannot be opened again: {first_line(error)}; start again") from error


def _gather_chunked(path: Path, dataset: Any, info: ArrayInfo) -> Gather:
    def gather(indices: NDArray[np.int64]) -> NDArray[Any]:
        if not len(indices):
            return np.empty((0, *info.shape), info.dtype)
        # h5py takes ascending numbers only, each once.
        wanted, places = np.unique(indices, return_inverse=True)
        try:
            found = dataset[wanted]
        except _H5PY_ERRORS as error:
            raise DataError(
                f"{path}: samples of {info.key} cannot be read: {first_line(error)}; "
                "copy or write the file again"
            ) from error
        in_order: NDArray[Any] = found[places].astype(info.dtype, copy=False)
        return in_order

    return gather
