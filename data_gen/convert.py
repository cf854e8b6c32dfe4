"""HDF5, .pt, .safetensors, .npz, .npy and IDX into each other, in bounded memory."""

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

from data_gen import array_files
from data_gen.array_files import IDX_SUFFIX, NPZ_SUFFIX, SINGLE_SUFFIXES
from data_gen.array_streams import (
    Stream,
    check_regular,
    npz_keys,
    open_array,
    open_npz_array,
)
from data_gen.bfloat16 import from_bfloat16, num_infinite, to_bfloat16
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
from data_gen.writer import GenerateResult, Piece, Progress, write_files
from ddp_hpc import h5_layout
from ddp_hpc.data.formats import open_samples
from ddp_hpc.data.samples import ArrayInfo, Samples, check_pair, check_test
from ddp_hpc.data.tensor_files import read_num_classes, wanted_keys
from ddp_hpc.errors import DataError, RequestError
from ddp_hpc.h5_layout import ATTR_NUM_CLASSES, ATTR_SOURCE, BFLOAT16, SRC, TEST_SRC, TEST_TGT, TGT

FLOATS = ("float32", "float64", "float16", BFLOAT16)
SUFFIXES = (*h5_layout.SUFFIXES, *array_files.SUFFIXES)
_BLOCK_BYTES = 8 * 1024 * 1024
# HDF5 keeps attributes of up to 64 KiB.
_MAX_SOURCE = 4096

# By the names that the arrays have in a file of ours.
_Infos: TypeAlias = Mapping[str, ArrayInfo]
# Some samples of an array at a time; those of one array in order.
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
    """The samples of `inputs` as a file of the format that the suffix of `output` names.

    `inputs` is one .h5, .hdf5, .pt, .safetensors or .npz file with both arrays, or two
    .npy or IDX files, src and tgt. A .npy or .idx file holds one array, so as `output` it
    makes one file for each, `x.src.npy` and `x.tgt.npy` of `x.npy`, and the result has
    one entry for each; those files have no place for num_classes and source, the others
    keep them. A test split is kept everywhere. `dtype` is one of `FLOATS` for arrays of
    floats; others stay as they are.

    A file made of the same inputs before is used as it is, any other is refused
    unless `force`; .npy and .idx files do not tell, and are refused. Inputs are told
    apart by real path, inode, size and time of change: no second pass over the data,
    and the same on every node that sees the file system.

    Raises:
        DataError: an input is missing, damaged or not two arrays of equally many samples.
        RequestError: what the output cannot hold, too little space, or another file there and not `force`.
        DdpHpcError: the writing itself failed; nothing is left behind.
    """
    suffix = format_of(output, SUFFIXES)
    _check_number(inputs)
    seen = [_identity(path) for path in inputs]
    where = ", ".join(plain_text(path.name) for path in inputs)
    infos, blocks = _open(inputs, src_key, tgt_key)
    arrays = {name: _array(where, name, info, dtype) for name, info in infos.items()}
    for array in arrays.values():
        array_files.refuse_unfit(output, array)
    recipe = {
        "kind": "converted",
        **{key: [identity[key] for identity in seen] for key in seen[0]},
        "src_key": src_key,
        "tgt_key": tgt_key,
        "dtype": dtype,
        "format_version": h5_layout.FORMAT_VERSION,
    }
    attributes = {ATTR_SOURCE: f"converted from {where}", **_marks(inputs)}
    files = _files(output, suffix, Contents(tuple(arrays.values()), recipe, attributes))
    _refuse_own_input(inputs, [path for path, _ in files])

    # IDX is big-endian.
    swaps = suffix == IDX_SUFFIX and sys.byteorder == "little"

    def pieces() -> Iterator[Piece]:
        firsts = dict.fromkeys(arrays, 0)
        for name, block in blocks():
            values = _cast(where, infos[name], arrays[name].dtype, block)
            yield name, firsts[name], values.byteswap() if swaps else values
            firsts[name] += values.size
        if [_identity(path) for path in inputs] != seen:
            raise DataError(f"{where} changed while it was read; start again when nobody writes it")

    return write_files(files, pieces, suffixes=SUFFIXES, force=force, progress=progress)


def _files(output: Path, suffix: str, contents: Contents) -> list[tuple[Path, Contents]]:
    """The files that `output` stands for: `x.npy` for `x.src.npy` and `x.tgt.npy`, `x.npz` for itself."""
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
    both = (*h5_layout.SUFFIXES, NPZ_SUFFIX)
    alone = [path for path in inputs if path.suffix.lower() in both]
    if len(inputs) == 2 and alone:
        raise RequestError(f"{alone[0]} may hold both arrays and stands beside another input; give it alone")
    if len(inputs) == 1 and not alone:
        raise RequestError(
            f"{inputs[0]} alone does not hold src and tgt; give one file of {' '.join(both)}, "
            "or two .npy or IDX files, src first"
        )
    if len(inputs) not in (1, 2):
        raise RequestError(f"{len(inputs)} inputs; give one that holds both arrays, or two with one each")


def _identity(path: Path) -> dict[str, int | str]:
    """Tells an input from others, and from what it was. No device: it differs between the nodes of a site."""
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
            # Nothing is there, or the writer says what is wrong with the name.
            with suppress(OSError):
                if path.samefile(own):
                    raise RequestError(f"{path} is the input {own} itself; name another file")


def _open(inputs: Sequence[Path], src_key: str, tgt_key: str) -> tuple[_Infos, Callable[[], _Blocks]]:
    path = inputs[0]
    if len(inputs) == 2:
        return _of_streams([open_array(each, key) for each, key in zip(inputs, (SRC, TGT), strict=True)])
    if path.suffix.lower() == NPZ_SUFFIX:
        keys = wanted_keys(path, npz_keys(path), src_key, tgt_key)
        return _of_streams([open_npz_array(path, key) for key in keys])
    return _of_samples(open_samples(path, src_key=src_key, tgt_key=tgt_key))


def _marks(inputs: Sequence[Path]) -> dict[str, int | str]:
    """What is said of the samples; all else is about the file they are in."""
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


def _of_streams(streams: Sequence[Stream]) -> tuple[_Infos, Callable[[], _Blocks]]:
    """Of two streams, or four with a test split."""
    infos = [stream.info for stream in streams]
    for src, tgt in zip(infos[::2], infos[1::2], strict=True):
        check_pair(streams[-1].path, src, tgt)
    if len(infos) > 2:
        check_test(streams[0].path, (infos[0], infos[1]), (infos[2], infos[3]))

    def blocks() -> _Blocks:
        for name, stream in zip(ARRAY_NAMES, streams, strict=False):
            for block in stream.blocks():
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
    wanted = dtype if dtype is not None and found in FLOATS else found
    if wanted not in ITEM_BYTES:
        raise DataError(
            f"{where}: {info.key} is {found}, which is none of {', '.join(ITEM_BYTES)}; save it as one"
        )
    if len(info.shape) > MAX_AXES:
        raise DataError(f"{where}: samples of {info.key} have {len(info.shape)} axes, more than {MAX_AXES}")
    return Array(name, (info.num_samples, *info.shape), wanted)


def _cast(where: str, info: ArrayInfo, dtype: str, values: NDArray[Any]) -> NDArray[Any]:
    """The values as `dtype`; bfloat16 are uint16."""
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
