"""Converts between HDF5, .pt, .safetensors, .npz, .npy and IDX files, in bounded memory."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from data_gen import create_array_files
from data_gen.array_readers import (
    ArrayReader,
    check_regular,
    npz_keys,
    open_array,
    open_npz_array,
)
from data_gen.bfloat16 import from_bfloat16, num_infinite, to_bfloat16
from data_gen.create_array_files import IDX_SUFFIX, NPZ_SUFFIX, SINGLE_SUFFIXES
from data_gen.formats import (
    ARRAY_NAMES,
    ITEM_BYTES,
    Array,
    Contents,
    ForeignFileError,
    format_of,
    plain_text,
    read_marks,
)
from data_gen.recipe import MAX_AXES
from data_gen.writer import Chunk, GenerateResult, Progress, write_files
from ddp_hpc.base import data_file_layout
from ddp_hpc.base.data_file_layout import (
    ATTR_NUM_CLASSES,
    ATTR_SOURCE,
    BFLOAT16,
    SRC,
    TEST_SRC,
    TEST_TGT,
    TGT,
)
from ddp_hpc.base.errors import DataError, RequestError
from ddp_hpc.data.open_file import open_samples
from ddp_hpc.data.samples import ArrayInfo, Samples, check_pair, check_test
from ddp_hpc.data.tensor_files import read_num_classes, wanted_keys

FLOATS = ("float32", "float64", "float16", BFLOAT16)
SUFFIXES = (*data_file_layout.SUFFIXES, *create_array_files.SUFFIXES)
_BLOCK_BYTES = 8 * 1024 * 1024
# HDF5 attributes are limited to 64 KiB.
_MAX_SOURCE = 4096

# Descriptions of the input arrays, by the names of the arrays in the output file.
_Infos: TypeAlias = Mapping[str, ArrayInfo]
# Blocks of samples with the name of their array; the blocks of each array are in order.
_Blocks: TypeAlias = Iterator[tuple[str, NDArray[Any]]]


def convert(
    inputs: Sequence[Path],
    output: Path,
    *,
    src_key: str = SRC,
    tgt_key: str = TGT,
    dtype: str | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> list[GenerateResult]:
    """Writes the samples of `inputs` to a file whose format is given by the suffix of `output`.

    `inputs` is one .h5, .hdf5, .pt, .safetensors or .npz file with both arrays, or two
    .npy or IDX files, src and tgt. A .npy or .idx file stores a single array, so the
    output `x.npy` becomes `x.src.npy` and `x.tgt.npy`, with one entry each in the result.
    These two formats cannot store num_classes and source; all others preserve them. A
    test split is always preserved. `dtype` is one of `FLOATS` and applies to
    floating-point arrays only.

    An existing file made from the same inputs is reused. Unless `force` is set, any other existing file is an
    error. This includes all .npy and .idx files, because they do not record their inputs. Inputs are
    identified by real path, inode, size and modification time, which requires no second pass over the data
    and is the same on every node.

    Raises:
        DataError: an input is missing or damaged, or its arrays differ in length.
        RequestError: the output cannot store the arrays, there is too little space, or
            another file exists and `force` is not set.
        DdpHpcError: writing failed; no partial file is left.
    """
    suffix = format_of(output, SUFFIXES)
    _check_number(inputs)
    identities = [_identity(path) for path in inputs]
    where = ", ".join(plain_text(path.name) for path in inputs)
    infos, blocks = _open(inputs, src_key, tgt_key)
    arrays = {name: _array(where, name, info, dtype) for name, info in infos.items()}
    for array in arrays.values():
        create_array_files.refuse_unfit(output, array)
    recipe = {
        "kind": "converted",
        **{key: [identity[key] for identity in identities] for key in identities[0]},
        "src_key": src_key,
        "tgt_key": tgt_key,
        "dtype": dtype,
        "format_version": data_file_layout.FORMAT_VERSION,
    }
    attributes = {ATTR_SOURCE: f"converted from {where}", **_marks(inputs)}
    files = _files(output, suffix, Contents(tuple(arrays.values()), recipe, attributes))
    _refuse_own_input(inputs, [path for path, _ in files])

    def chunks() -> Iterator[Chunk]:
        yield from _chunks(where, infos, arrays, blocks(), big_endian=suffix == IDX_SUFFIX)
        if [_identity(path) for path in inputs] != identities:
            raise DataError(f"{where} changed while it was read; retry when no program is writing it")

    return write_files(files, chunks, suffixes=SUFFIXES, force=force, progress=progress)


def _chunks(
    where: str, infos: _Infos, arrays: Mapping[str, Array], blocks: _Blocks, *, big_endian: bool
) -> Iterator[Chunk]:
    """Yields the blocks in the data types and byte order of the output."""
    swaps = big_endian and sys.byteorder == "little"
    firsts = dict.fromkeys(arrays, 0)
    for name, block in blocks:
        values = _cast(where, infos[name], arrays[name].dtype, block)
        yield name, firsts[name], values.byteswap() if swaps else values
        firsts[name] += values.size


def _files(output: Path, suffix: str, contents: Contents) -> list[tuple[Path, Contents]]:
    """Returns the files to write: `x.src.npy` and `x.tgt.npy` for `x.npy`, `x.npz` itself for `x.npz`."""
    if suffix not in SINGLE_SUFFIXES:
        return [(output, contents)]
    return [
        (
            output.with_name(f"{output.stem}.{array.name.replace('/', '.')}{output.suffix}"),
            replace(contents, arrays=(array,)),
        )
        for array in contents.arrays
    ]


def _check_number(inputs: Sequence[Path]) -> None:
    both = (*data_file_layout.SUFFIXES, NPZ_SUFFIX)
    alone = [path for path in inputs if path.suffix.lower() in both]
    if len(inputs) == 2 and alone:
        raise RequestError(f"{alone[0]} is in a format that contains both arrays; pass it as the only input")
    if len(inputs) == 1 and not alone:
        raise RequestError(
            f"{inputs[0]} contains only one array. Pass two .npy or IDX files, src first, "
            f"or one file with both arrays ({' '.join(both)})."
        )
    if len(inputs) not in (1, 2):
        raise RequestError(
            f"got {len(inputs)} inputs; pass one file with both arrays, or two files with one array each"
        )


def _identity(path: Path) -> dict[str, int | str]:
    """Returns the properties that identify an input, except the device number, which differs per node."""
    found = check_regular(path)
    return {
        "inputs": plain_text(os.path.realpath(path)),
        "input_inodes": found.st_ino,
        "input_bytes": found.st_size,
        "input_mtime_ns": found.st_mtime_ns,
    }


def _refuse_own_input(inputs: Sequence[Path], paths: Sequence[Path]) -> None:
    for path in paths:
        for own in inputs:
            # An OSError means that the output does not exist, or that the writer will report its path.
            with suppress(OSError):
                if path.samefile(own):
                    raise RequestError(
                        f"the output {path} is the same file as the input {own}; choose another output file"
                    )


def _open(inputs: Sequence[Path], src_key: str, tgt_key: str) -> tuple[_Infos, Callable[[], _Blocks]]:
    path = inputs[0]
    if len(inputs) == 2:
        return _of_readers([open_array(each, key) for each, key in zip(inputs, (SRC, TGT), strict=True)])
    if path.suffix.lower() == NPZ_SUFFIX:
        keys = wanted_keys(path, npz_keys(path), src_key, tgt_key)
        return _of_readers([open_npz_array(path, key) for key in keys])
    return _of_samples(open_samples(path, src_key=src_key, tgt_key=tgt_key))


def _marks(inputs: Sequence[Path]) -> dict[str, int | str]:
    """Returns `num_classes` and `source` of a single input; both are omitted if it does not have them."""
    path, *others = inputs
    if others:
        return {}
    try:
        found = read_marks(path, path.suffix.lower())
    except ForeignFileError as error:
        raise DataError(f"{path} is damaged: {error}; copy or write it again") from None
    source, num_classes = found.get(ATTR_SOURCE), read_num_classes(path, found.get(ATTR_NUM_CLASSES))
    return {
        **({} if num_classes is None else {ATTR_NUM_CLASSES: num_classes}),
        **({ATTR_SOURCE: plain_text(source)[:_MAX_SOURCE]} if isinstance(source, str) else {}),
    }


def _of_readers(readers: Sequence[ArrayReader]) -> tuple[_Infos, Callable[[], _Blocks]]:
    """Returns the descriptions of the arrays, and a function that yields their blocks.

    There are two arrays, src and tgt, or four if there is a test split.
    """
    infos = [reader.info for reader in readers]
    for src, tgt in zip(infos[::2], infos[1::2], strict=True):
        check_pair(readers[-1].path, src, tgt)
    if len(infos) > 2:
        check_test(readers[0].path, (infos[0], infos[1]), (infos[2], infos[3]))

    def blocks() -> _Blocks:
        for name, reader in zip(ARRAY_NAMES, readers, strict=False):
            for block in reader.blocks():
                yield name, block

    return dict(zip(ARRAY_NAMES, infos, strict=False)), blocks


def _of_samples(samples: Samples) -> tuple[_Infos, Callable[[], _Blocks]]:
    sample_bytes = samples.sample_bytes
    step = max(1, _BLOCK_BYTES // sample_bytes)
    splits = [samples, *([samples.test] if samples.test else [])]

    def blocks() -> _Blocks:
        with closing(samples):
            for names, split in zip(((SRC, TGT), (TEST_SRC, TEST_TGT)), splits, strict=False):
                for start in range(0, split.num_samples, step):
                    numbers = np.arange(start, min(start + step, split.num_samples))
                    yield from zip(names, split.read(numbers), strict=True)

    infos = [info for split in splits for info in (split.src, split.tgt)]
    return dict(zip(ARRAY_NAMES, infos, strict=False)), blocks


def _array(where: str, name: str, info: ArrayInfo, dtype: str | None) -> Array:
    found = info.dtype_name
    target = dtype if dtype is not None and found in FLOATS else found
    if target not in ITEM_BYTES:
        raise DataError(f"{where}: {info.key} has dtype {found}; save it as one of {', '.join(ITEM_BYTES)}")
    if len(info.shape) > MAX_AXES:
        raise DataError(
            f"{where}: samples of {info.key} have {len(info.shape)} axes; at most {MAX_AXES} are supported"
        )
    return Array(name, (info.num_samples, *info.shape), target)


def _cast(where: str, info: ArrayInfo, dtype: str, values: NDArray[Any]) -> NDArray[Any]:
    """Converts the values to `dtype`, where bfloat16 is represented by uint16."""
    if info.dtype_name == dtype:
        return values
    try:
        with np.errstate(over="raise"):
            if info.bfloat16:
                values = from_bfloat16(values)
            if dtype != BFLOAT16:
                return values.astype(dtype)
            values = values.astype(np.float32)
            bits = to_bfloat16(values)
            if num_infinite(bits) > np.count_nonzero(np.isinf(values)):
                raise FloatingPointError
            return bits
    except FloatingPointError:
        raise DataError(
            f"{where}: {info.key} has values too large for {dtype}; choose another --dtype"
        ) from None
