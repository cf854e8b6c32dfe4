"""Reads .pt files (torch.save of a dict) and .safetensors files through memory maps."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddp_hpc.base.data_file_layout import ATTR_NUM_CLASSES, BFLOAT16, SAFETENSORS_DTYPES
from ddp_hpc.base.errors import DataError
from ddp_hpc.data.file_arrays import Access, check_array, combine, read_num_classes, wanted_keys
from ddp_hpc.data.memory_mapped import (
    ArrayPlace,
    FileIdentity,
    OpenFile,
    check_within,
    gather_from,
    open_mapped,
)
from ddp_hpc.data.samples import ArrayInfo, OpenArrays, Samples, first_line

_DTYPE_NAMES = {code: name for name, code in SAFETENSORS_DTYPES.items()}


def open_pt(path: Path, src_key: str, tgt_key: str) -> Samples:
    """Opens the samples of a dict of tensors written by torch.save.

    Raises:
        DataError: the file cannot be used for training.
    """
    identity = FileIdentity.of(path)
    entries = _load_pt(path)
    infos = {key: _pt_info(path, key, entries[key]) for key in wanted_keys(path, entries, src_key, tgt_key)}
    num_classes = read_num_classes(path, entries.get(ATTR_NUM_CLASSES))
    return combine(
        path,
        infos,
        num_classes,
        lambda src, tgt: Access("pt", partial(_open_pt, path, identity, src.key, tgt.key)),
    )


def open_safetensors(path: Path, src_key: str, tgt_key: str) -> Samples:
    """Opens the samples of a .safetensors file.

    Raises:
        DataError: the file cannot be used for training.
    """
    identity = FileIdentity.of(path)
    header, data_start = _load_header(path)
    metadata = header.pop("__metadata__", {})
    infos: dict[str, ArrayInfo] = {}
    places: dict[str, ArrayPlace] = {}
    for key in wanted_keys(path, header, src_key, tgt_key):
        entry = header[key]
        name = _DTYPE_NAMES.get(entry["dtype"])
        if name is None:
            raise DataError(
                f"{path}: {key} has dtype {entry['dtype']}, which NumPy does not support; save it as float32"
            )
        bfloat16 = name == BFLOAT16
        dtype = np.dtype("uint16" if bfloat16 else name)
        infos[key] = check_array(path, key, tuple(entry["shape"]), dtype, bfloat16)
        places[key] = ArrayPlace(infos[key], data_start + entry["data_offsets"][0])
        check_within(path, identity, places[key])
    num_classes = read_num_classes(path, metadata.get(ATTR_NUM_CLASSES))
    return combine(
        path,
        infos,
        num_classes,
        lambda src, tgt: Access(
            "safetensors", partial(open_mapped, path, identity, places[src.key], places[tgt.key])
        ),
    )


def _load_pt(path: Path) -> dict[str, Any]:
    import torch

    try:
        entries = torch.load(path, weights_only=True, mmap=True, map_location="cpu")
    except Exception as error:  # a damaged pickle can raise almost any exception
        raise DataError(
            f"{path} is damaged or not a dict of tensors ({first_line(error)}). "
            "Copy it again, or save a dict of tensors with torch.save."
        ) from None
    if not isinstance(entries, dict):
        raise DataError(
            f"{path} contains a value of type {type(entries).__name__}; a dict of tensors is required"
        )
    return entries


def _pt_info(path: Path, key: str, tensor: object) -> ArrayInfo:
    array, bfloat16 = _as_array(path, key, tensor)
    return check_array(path, key, array.shape, array.dtype, bfloat16)


def _as_array(path: Path, key: str, tensor: object) -> tuple[NDArray[Any], bool]:
    """Returns the tensor as a NumPy array, and whether its uint16 values are the bits of bfloat16."""
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise DataError(f"{path}: {key} is a value of type {type(tensor).__name__}; a tensor is required")
    try:
        bfloat16 = tensor.dtype is torch.bfloat16
        return (tensor.view(torch.uint16) if bfloat16 else tensor).detach().numpy(), bfloat16
    except (TypeError, RuntimeError) as error:
        raise DataError(
            f"{path}: {key} is a tensor of dtype {tensor.dtype} and layout {tensor.layout}; "
            "a dense tensor of a type that NumPy supports is required, such as float32"
        ) from error


def _open_pt(path: Path, identity: FileIdentity, src_key: str, tgt_key: str) -> OpenArrays:
    file = OpenFile.open(path, identity)
    entries = _load_pt(path)
    src, tgt = (gather_from(_as_array(path, key, entries[key])[0]) for key in (src_key, tgt_key))
    return OpenArrays(src, tgt, check=file.check, close=file.file.close)


def _load_header(path: Path) -> tuple[dict[str, Any], int]:
    """Returns the entries of the header, checked by the safetensors library, and the offset of the data."""
    from safetensors import SafetensorError, safe_open

    try:
        # The library checks that header, offsets and file size are consistent.
        with safe_open(path, framework="np"), path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header: dict[str, Any] = json.loads(file.read(length))
    except (SafetensorError, OSError, ValueError) as error:
        raise DataError(
            f"{path} is damaged or not a safetensors file: {first_line(error)}; copy it again"
        ) from None
    return header, 8 + length
