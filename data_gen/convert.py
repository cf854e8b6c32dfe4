"""Converts HDF5, .pt, .safetensors, .npy and .npz files to HDF5, .pt or .safetensors."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_gen.formats import ITEM_BYTES, Array, Contents, format_of, infos_of, plain_text
from data_gen.recipe import MAX_AXES
from data_gen.writer import Chunk, GenerateResult, Progress, write_file
from ddp_hpc.base import data_file_layout
from ddp_hpc.base.data_file_layout import (
    ATTR_NUM_CLASSES,
    ATTR_SOURCE,
    SRC,
    TEST_SRC,
    TEST_TGT,
    TGT,
)
from ddp_hpc.base.errors import DataError, RequestError
from ddp_hpc.data.file_arrays import wanted_keys
from ddp_hpc.data.in_memory import samples_of_arrays
from ddp_hpc.data.open_file import check_readable_file, open_samples
from ddp_hpc.data.samples import ArrayInfo, Samples, first_line

NPZ_SUFFIX = ".npz"
_BLOCK_BYTES = 8 * 1024 * 1024
# Limit for the text of a library's error: NumPy quotes the header that it cannot read.
_MAX_REASON = 200


def convert(
    inputs: Sequence[Path],
    output: Path,
    *,
    src_key: str = SRC,
    tgt_key: str = TGT,
    force: bool = False,
    progress: Progress | None = None,
) -> GenerateResult:
    """Writes the samples of `inputs` to a file whose format is given by the suffix of `output`.

    `inputs` is one .h5, .hdf5, .pt, .safetensors or .npz file with both arrays, or two .npy files, src and
    tgt. The types of the arrays, num_classes and a test split are preserved. The arrays of an .npz file are
    loaded into memory.

    An existing file made from the same inputs is reused. Inputs are identified by real path, inode, size and
    modification time, which requires no second pass over the data and is the same on every node.

    Raises:
        DataError: an input is missing or damaged, or its arrays differ in length.
        RequestError: there is too little space, or another file exists and `force` is not set.
        DdpHpcError: writing failed; no partial file is left.
    """
    format_of(output)
    _check_number(inputs)
    identities = [_identity(path) for path in inputs]
    where = ", ".join(plain_text(path.name) for path in inputs)
    samples = _open(inputs, where, src_key, tgt_key)
    arrays = {name: _array(where, name, info) for name, info in infos_of(samples).items()}
    recipe = {
        "kind": "converted",
        **{key: [identity[key] for identity in identities] for key in identities[0]},
        "src_key": src_key,
        "tgt_key": tgt_key,
        "format_version": data_file_layout.FORMAT_VERSION,
    }
    attributes: dict[str, int | str] = {ATTR_SOURCE: f"converted from {where}"}
    if samples.num_classes is not None:
        attributes[ATTR_NUM_CLASSES] = samples.num_classes
    _refuse_own_input(inputs, output)

    def chunks() -> Iterator[Chunk]:
        firsts = dict.fromkeys(arrays, 0)
        for name, block in _blocks(samples):
            yield name, firsts[name], block
            firsts[name] += block.size
        if [_identity(path) for path in inputs] != identities:
            raise DataError(f"{where} changed while it was read; retry when no program is writing it")

    contents = Contents(tuple(arrays.values()), recipe, attributes)
    return write_file(output, contents, chunks, force=force, progress=progress)


def _check_number(inputs: Sequence[Path]) -> None:
    both = (*data_file_layout.SUFFIXES, NPZ_SUFFIX)
    has_both = [path.suffix.lower() in both for path in inputs]
    if has_both not in ([True], [False, False]):
        raise RequestError(
            f"cannot convert {', '.join(map(str, inputs)) or 'nothing'}; pass one file with both arrays "
            f"({' '.join(both)}), or two .npy files, src first"
        )


def _identity(path: Path) -> dict[str, int | str]:
    """Returns the properties that identify an input, except the device number, which differs per node."""
    status = check_readable_file(path)
    return {
        "inputs": plain_text(os.path.realpath(path)),
        "input_inodes": status.st_ino,
        "input_bytes": status.st_size,
        "input_mtime_ns": status.st_mtime_ns,
    }


def _refuse_own_input(inputs: Sequence[Path], output: Path) -> None:
    for path in inputs:
        # An OSError means that the output does not exist, or that the writer will report its path.
        with suppress(OSError):
            if output.samefile(path):
                raise RequestError(
                    f"the output {output} is the same file as the input {path}; choose another output file"
                )


def _open(inputs: Sequence[Path], where: str, src_key: str, tgt_key: str) -> Samples:
    path = inputs[0]
    if len(inputs) == 1 and path.suffix.lower() != NPZ_SUFFIX:
        return open_samples(path, src_key=src_key, tgt_key=tgt_key)
    if len(inputs) == 2:
        src, tgt = (_read_numpy(path, partial(np.lib.format.open_memmap, mode="r")) for path in inputs)
    else:
        archive = _read_numpy(path, lambda file: dict(np.load(file)))
        src, tgt = (archive[key] for key in wanted_keys(path, archive, src_key, tgt_key)[:2])
    return samples_of_arrays(src, tgt, Path(where))


def _read_numpy(path: Path, load: Callable[[Path], Any]) -> Any:
    try:
        return load(path)
    # NumPy parses the header as a Python literal, so a damaged one can raise almost any exception.
    except Exception as error:
        reason = first_line(error)[:_MAX_REASON]
        raise DataError(f"{path} cannot be read by NumPy: {reason}; copy or write it again") from None


def _blocks(samples: Samples) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yields blocks of samples with the name of their array; the blocks of each array are in order."""
    step = max(1, _BLOCK_BYTES // samples.sample_bytes)
    with closing(samples):
        for names, split in (((SRC, TGT), samples), ((TEST_SRC, TEST_TGT), samples.test)):
            for start in range(0, split.num_samples if split else 0, step):
                assert split is not None
                numbers = np.arange(start, min(start + step, split.num_samples))
                yield from zip(names, split.read(numbers), strict=True)


def _array(where: str, name: str, info: ArrayInfo) -> Array:
    if info.dtype_name not in ITEM_BYTES:
        raise DataError(
            f"{where}: {info.key} has dtype {info.dtype_name}; save it as one of {', '.join(ITEM_BYTES)}"
        )
    if len(info.shape) > MAX_AXES:
        raise DataError(
            f"{where}: samples of {info.key} have {len(info.shape)} axes; at most {MAX_AXES} are supported"
        )
    return Array(name, (info.num_samples, *info.shape), info.dtype_name)
