""".pt files (torch.save of a dict) and .safetensors files, both read by memory map."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddp_hpc.data.mapped import (
    ArrayPlace,
    FileIdentity,
    OpenFile,
    check_within,
    gather_from,
    open_mapped,
)
from ddp_hpc.data.samples import (
    ArrayInfo,
    OpenArrays,
    Samples,
    check_array,
    check_pair,
    check_test,
    first_line,
    listing,
)
from ddp_hpc.errors import DataError, nearest
from ddp_hpc.h5_layout import ATTR_NUM_CLASSES, TEST_GROUP

# https://huggingface.co/docs/safetensors, those that NumPy has, and the bits of bfloat16.
_SAFETENSORS_BFLOAT16 = "BF16"
_SAFETENSORS_DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F16": "float16",
    _SAFETENSORS_BFLOAT16: "uint16",
    "F32": "float32",
    "F64": "float64",
}
_TORCH_ERRORS = (
    OSError,
    RuntimeError,
    ValueError,
    EOFError,
    KeyError,
    TypeError,
    AttributeError,
    pickle.UnpicklingError,
)


def open_pt(path: Path, src_key: str, tgt_key: str) -> Samples:
    """The samples of a dict of tensors that torch.save wrote.

    Raises:
        DataError: for every way in which the file is not what training needs.
    """
    identity = FileIdentity.of(path)
    entries = _load_pt(path)
    infos = {key: _pt_info(path, key, entries[key]) for key in wanted_keys(path, entries, src_key, tgt_key)}
    return _samples(
        path,
        infos,
        (src_key, tgt_key),
        num_classes=read_num_classes(path, entries.get(ATTR_NUM_CLASSES)),
        reader="pt",
        opener=lambda src, tgt: partial(_open_pt, path, identity, src.key, tgt.key),
    )


def open_safetensors(path: Path, src_key: str, tgt_key: str) -> Samples:
    """The samples of a .safetensors file.

    Raises:
        DataError: for every way in which the file is not what training needs.
    """
    identity = FileIdentity.of(path)
    header, behind_header = _load_header(path)
    metadata = header.pop("__metadata__", {})
    infos: dict[str, ArrayInfo] = {}
    places: dict[str, ArrayPlace] = {}
    for key in wanted_keys(path, header, src_key, tgt_key):
        entry = header[key]
        if entry["dtype"] not in _SAFETENSORS_DTYPES:
            raise DataError(
                f"{path}: {key} has dtype {entry['dtype']}, which NumPy lacks; save it as float32"
            )
        dtype = np.dtype(_SAFETENSORS_DTYPES[entry["dtype"]])
        bfloat16 = entry["dtype"] == _SAFETENSORS_BFLOAT16
        infos[key] = check_array(path, key, tuple(entry["shape"]), dtype, bfloat16)
        places[key] = ArrayPlace(infos[key], behind_header + entry["data_offsets"][0])
        check_within(path, identity, places[key])
    return _samples(
        path,
        infos,
        (src_key, tgt_key),
        num_classes=read_num_classes(path, metadata.get(ATTR_NUM_CLASSES)),
        reader="safetensors",
        opener=lambda src, tgt: partial(open_mapped, path, identity, places[src.key], places[tgt.key]),
    )


def _samples(
    path: Path,
    infos: Mapping[str, ArrayInfo],
    keys: tuple[str, str],
    *,
    num_classes: int | None,
    reader: str,
    opener: Any,
) -> Samples:
    def split(src: ArrayInfo, tgt: ArrayInfo, test: Samples | None) -> Samples:
        check_pair(path, src, tgt)
        opened = opener(src, tgt)
        return Samples(path, src, tgt, num_classes=num_classes, reader=reader, open_arrays=opened, test=test)

    train = infos[keys[0]], infos[keys[1]]
    test_keys = [f"{TEST_GROUP}/{key}" for key in keys]
    if test_keys[0] not in infos:
        return split(*train, test=None)
    test = infos[test_keys[0]], infos[test_keys[1]]
    check_test(path, train, test)
    return split(*train, test=split(*test, test=None))


def wanted_keys(path: Path, names: Iterable[str], src_key: str, tgt_key: str) -> list[str]:
    """The keys to read, those of the test split too where there is one."""
    there = [name for name in names if isinstance(name, str)]
    listed = listing(there)
    for key, option in ((src_key, "--src-key"), (tgt_key, "--tgt-key")):
        if key not in there:
            raise DataError(
                f"{path}: there is no {key!r}{nearest(key, there)}; the file has {listed or 'nothing'}; "
                f"name one with {option}"
            )
    test_keys = [f"{TEST_GROUP}/{key}" for key in (src_key, tgt_key)]
    found = [key for key in test_keys if key in there]
    if len(found) == 1:
        raise DataError(f"{path}: of {' and '.join(test_keys)} only {found[0]} is there; write both, or none")
    return [src_key, tgt_key, *found]


def read_num_classes(path: Path, value: object) -> int | None:
    """The number of classes that a file's metadata says; None where it says nothing.

    Raises:
        DataError: where it says something else.
    """
    if value is None:
        return None
    # Metadata of safetensors is text.
    text = str(value)
    if not (text.isascii() and text.isdecimal() and int(text) > 0):
        raise DataError(f"{path}: {ATTR_NUM_CLASSES} is {text[:40]!r}; a number of at least 1 is needed")
    return int(text)


def _load_pt(path: Path) -> dict[str, Any]:
    import torch

    try:
        entries = torch.load(path, weights_only=True, mmap=True, map_location="cpu")
    except _TORCH_ERRORS as error:
        raise DataError(
            f"{path} is damaged or no dict of tensors: torch.load says {first_line(error)}; "
            "copy it again, or save a dict of tensors with torch.save"
        ) from None
    if not isinstance(entries, dict):
        raise DataError(f"{path} holds a {type(entries).__name__}; a dict with the tensors is needed")
    return entries


def _pt_info(path: Path, key: str, tensor: object) -> ArrayInfo:
    array, bfloat16 = _as_array(path, key, tensor)
    return check_array(path, key, array.shape, array.dtype, bfloat16)


def _as_array(path: Path, key: str, tensor: object) -> tuple[NDArray[Any], bool]:
    """The tensor as NumPy sees it, and whether its uint16 stand for bfloat16."""
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise DataError(f"{path}: {key} is a {type(tensor).__name__}; a tensor is needed")
    try:
        bfloat16 = tensor.dtype is torch.bfloat16
        return (tensor.view(torch.uint16) if bfloat16 else tensor).detach().numpy(), bfloat16
    except (TypeError, RuntimeError) as error:
        raise DataError(
            f"{path}: {key} is a tensor of {tensor.dtype}, {tensor.layout}; "
            "a dense one of a type that NumPy has is needed, such as float32"
        ) from error


def _open_pt(path: Path, identity: FileIdentity, src_key: str, tgt_key: str) -> OpenArrays:
    file = OpenFile.open(path, identity)
    entries = _load_pt(path)
    src, tgt = (gather_from(_as_array(path, key, entries[key])[0]) for key in (src_key, tgt_key))
    return OpenArrays(src, tgt, check=file.check, close=file.file.close)


def _load_header(path: Path) -> tuple[dict[str, Any], int]:
    """Entries of the header, found sound by the library, and the offset of the first byte behind it."""
    from safetensors import SafetensorError, safe_open

    try:
        # The library checks that header, offsets and file size fit together.
        with safe_open(path, framework="np"), path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header: dict[str, Any] = json.loads(file.read(length))
    except (SafetensorError, OSError, ValueError) as error:
        raise DataError(
            f"{path} is damaged or no safetensors file: {first_line(error)}; copy it again"
        ) from None
    return header, 8 + length
