"""Creates .npz, .npy and IDX files, and checks which arrays they can store."""

from __future__ import annotations

import io
import os
import struct
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy as np
from numpy.lib import format as npy

from data_gen.array_readers import IDX_DTYPES, NPY_SUFFIX
from ddp_hpc.base.data_file_layout import BFLOAT16
from ddp_hpc.base.errors import RequestError

if TYPE_CHECKING:
    from data_gen.formats import Array

NPZ_SUFFIX, IDX_SUFFIX = ".npz", ".idx"
SUFFIXES = (NPZ_SUFFIX, NPY_SUFFIX, IDX_SUFFIX)
# These formats store a single array without metadata.
SINGLE_SUFFIXES = (NPY_SUFFIX, IDX_SUFFIX)
_MAX_IDX_SIZE = 2**32 - 1
_BLOCK_BYTES = 4 * 1024 * 1024
# In the zip format's local header: the size of its fixed part, and the offset of the CRC-32 of the data.
_LOCAL_BYTES, _LOCAL_CRC = 30, 14


def refuse_unfit(output: Path, array: Array) -> None:
    """Raises RequestError if the format of `output`, given by its suffix, cannot store the array."""
    suffix = output.suffix.lower()
    if suffix == IDX_SUFFIX and array.dtype not in IDX_DTYPES.values():
        reason = f"has dtype {array.dtype}, but IDX supports only {', '.join(IDX_DTYPES.values())}"
    elif suffix == IDX_SUFFIX and max(array.shape) > _MAX_IDX_SIZE:
        reason = f"has shape {array.shape}, but sizes in IDX files are at most {_MAX_IDX_SIZE}"
    elif suffix in SUFFIXES and array.dtype == BFLOAT16:
        reason = f"has dtype {array.dtype}, which NumPy does not support"
    else:
        return
    hint = " or add --dtype float32" if "float" in array.dtype else ""
    raise RequestError(f"{output}: {array.name} {reason}. Write an .h5 file{hint}.")


def lay_out_single(path: Path, suffix: str, array: Array) -> dict[str, int]:
    """Creates the .npy or .idx file, and returns the byte offset of its array. IDX values are big-endian."""
    if suffix == NPY_SUFFIX:
        header = _npy_header(array)
    else:
        code = next(code for code, name in IDX_DTYPES.items() if name == array.dtype)
        num_axes = len(array.shape)
        header = struct.pack(f">4B{num_axes}I", 0, 0, code, num_axes, *array.shape)
    with path.open("wb") as file:
        file.write(header)
        file.truncate(len(header) + array.num_bytes)
    return {array.name: len(header)}


def lay_out_npz(path: Path, arrays: Sequence[Array]) -> dict[str, int]:
    """Creates an uncompressed .npz file for `seal_npz` to complete; returns the byte offset of each array."""
    offsets = {}
    with path.open("wb") as file, zipfile.ZipFile(file, "w") as archive:
        for array in arrays:
            header, info = _npy_header(array), _member_info(array.name)
            info.header_offset = file.tell()
            info.file_size = info.compress_size = len(header) + array.num_bytes
            info.CRC, info.external_attr = 0, 0o600 << 16
            file.write(info.FileHeader(zip64=True) + header)
            offsets[array.name] = file.tell()
            file.seek(array.num_bytes, os.SEEK_CUR)
            archive.filelist.append(info)
        archive.start_dir = file.tell()
    return offsets


def seal_npz(path: Path, marks: Mapping[str, int | str]) -> None:
    """Writes the checksums of the arrays, and adds the metadata in `marks` as scalar arrays."""
    with path.open("r+b") as file, zipfile.ZipFile(file, "a") as archive:
        for info in archive.infolist():
            file.seek(member_start(file, info))
            info.CRC = _crc32(file, info.file_size)
            file.seek(info.header_offset + _LOCAL_CRC)
            file.write(struct.pack("<I", info.CRC))
        for key, value in marks.items():
            with archive.open(_member_info(key), "w") as member:
                npy.write_array(member, np.asarray(value), allow_pickle=False)


def member_start(file: IO[bytes], info: zipfile.ZipInfo) -> int:
    """Returns the offset of the first byte of an uncompressed member in a zip file."""
    file.seek(info.header_offset)
    # The last four bytes of the local header are the lengths of the name and the extra field that follow it.
    name_bytes, extra_bytes = struct.unpack("<26x2H", file.read(_LOCAL_BYTES))
    return info.header_offset + _LOCAL_BYTES + int(name_bytes) + int(extra_bytes)


def _member_info(key: str) -> zipfile.ZipInfo:
    # ZipInfo's default date is 1980, so that equal arrays result in identical files.
    return zipfile.ZipInfo(key + NPY_SUFFIX)


def _npy_header(array: Array) -> bytes:
    header = io.BytesIO()
    descr = npy.dtype_to_descr(np.dtype(array.dtype))
    npy.write_array_header_1_0(header, {"descr": descr, "fortran_order": False, "shape": array.shape})
    return header.getvalue()


def _crc32(file: IO[bytes], num_bytes: int) -> int:
    crc = 0
    while num_bytes and (data := file.read(min(_BLOCK_BYTES, num_bytes))):
        crc = zlib.crc32(data, crc)
        num_bytes -= len(data)
    return crc
