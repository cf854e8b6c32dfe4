"""Checks the arrays that a file contains, and combines them to its samples and its test split."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ddp_hpc.base.data_file_layout import ATTR_NUM_CLASSES, TEST_GROUP
from ddp_hpc.base.errors import DataError, nearest
from ddp_hpc.base.option_names import named
from ddp_hpc.data.samples import ArrayInfo, OpenArrays, Samples

# The types that torch.from_numpy accepts and a model can use: bool, integers and floats of up to 8 bytes.
_KINDS = "biuf"
_MAX_ITEM_BYTES = 8
_MAX_LISTED = 12


@dataclass(frozen=True)
class Access:
    """How the samples of one split are read; the fields are those of `Samples`."""

    reader: str
    open_arrays: Callable[[], OpenArrays]


def combine(
    path: Path,
    infos: Mapping[str, ArrayInfo],
    num_classes: int | None,
    access: Callable[[ArrayInfo, ArrayInfo], Access],
) -> Samples:
    """Returns the samples of a file. `infos` describes the arrays with the keys that `wanted_keys` returns.

    Raises:
        DataError: the arrays of a split differ in length, or those of the two splits in shape or dtype.
    """

    def split(src: ArrayInfo, tgt: ArrayInfo) -> Samples:
        check_pair(path, src, tgt)
        return Samples(path=path, src=src, tgt=tgt, num_classes=num_classes, **vars(access(src, tgt)))

    src, tgt, *test = infos.values()
    samples = split(src, tgt)
    if test:
        samples.test = split(*test)
        _check_test(path, (src, tgt), test)
    return samples


def keys_of(src_key: str, tgt_key: str) -> list[str]:
    """Returns the keys of src and tgt, and of src and tgt in the test split."""
    return [src_key, tgt_key, f"{TEST_GROUP}/{src_key}", f"{TEST_GROUP}/{tgt_key}"]


def wanted_keys(path: Path, names: Collection[object], src_key: str, tgt_key: str) -> list[str]:
    """Returns the keys to read, including those of the test split if there is one.

    Raises:
        DataError: src, tgt or one array of the test split is not among the names.
    """
    present = [name for name in names if isinstance(name, str)]
    for key, option in ((src_key, named("src_key")), (tgt_key, named("tgt_key"))):
        if key not in present:
            raise DataError(
                f"{path} has no array {key!r}{nearest(key, present)} "
                f"(found: {_listing(present) or 'nothing'}). Choose one with {option}."
            )
    keys = keys_of(src_key, tgt_key)
    missing = [key for key in keys if key not in present]
    if len(missing) == 1:
        raise DataError(
            f"{path} has only one array of a test split, and no {missing[0]}; write both or neither of them"
        )
    return [key for key in keys if key not in missing]


def check_array(
    path: Path, key: str, shape: tuple[int, ...] | None, dtype: np.dtype[Any], bfloat16: bool = False
) -> ArrayInfo:
    """Describes an array after checking that the trainer can use it.

    Raises:
        DataError: the array has no sample axis or no samples, the samples are empty, or the values are
            not numeric.
    """
    if not shape:
        raise DataError(
            f"{path}: {key} is {'empty' if shape is None else 'a single value'}; "
            "an array whose first axis is the sample axis is required"
        )
    if shape[0] == 0:
        raise DataError(
            f"{path}: {key} has shape {shape} and thus no samples; write a file with at least one sample"
        )
    if 0 in shape:
        raise DataError(
            f"{path}: {key} has shape {shape}, so its samples are empty; all sizes must be greater than 0"
        )
    if dtype.kind not in _KINDS or dtype.itemsize > _MAX_ITEM_BYTES:
        raise DataError(
            f"{path}: {key} has dtype {str(dtype)[:100]}; "
            "a numeric type of torch is required, such as float32 or int64"
        )
    return ArrayInfo(key, shape[0], tuple(shape[1:]), dtype.newbyteorder("="), bfloat16)


def check_pair(path: Path, src: ArrayInfo, tgt: ArrayInfo) -> None:
    """Raises DataError unless both arrays have the same number of samples."""
    if src.num_samples != tgt.num_samples:
        raise DataError(
            f"{path}: {src.key} has {src.num_samples} samples, but {tgt.key} has {tgt.num_samples}; "
            "both must have the same number of samples"
        )


def _check_test(path: Path, train: Sequence[ArrayInfo], test: Sequence[ArrayInfo]) -> None:
    """Raises DataError unless both splits have the same shapes and dtypes."""
    for of_train, of_test in zip(train, test, strict=True):
        if (of_train.shape, of_train.dtype_name) != (of_test.shape, of_test.dtype_name):
            raise DataError(
                f"{path}: {of_train.key} has samples of shape {of_train.shape} and dtype "
                f"{of_train.dtype_name}, but {of_test.key} has {of_test.shape} and {of_test.dtype_name}; "
                "both splits must have the same shape and dtype"
            )


def read_num_classes(path: Path, value: object) -> int | None:
    """Parses the number of classes in a file's metadata; None if the metadata does not contain it.

    Raises:
        DataError: the value is not a positive integer.
    """
    if value is None:
        return None
    # The metadata of safetensors files is text.
    text = str(value)
    if not (text.isascii() and text.isdecimal() and len(text) < 19 and int(text) > 0):
        raise DataError(f"{path}: {ATTR_NUM_CLASSES} is {text[:40]!r}; it must be an integer of at least 1")
    return int(text)


def _listing(names: Sequence[str]) -> str:
    """Returns the first names joined by commas; empty if there are no names."""
    return ", ".join(names[:_MAX_LISTED]) + (", ..." if len(names) > _MAX_LISTED else "")
