"""Opens data files by suffix, and compares them with the shapes and dtype that options require."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from ddp_hpc.base.data_file_layout import HDF5_SUFFIXES, PT_SUFFIX, SAFETENSORS_SUFFIX, SRC, SUFFIXES, TGT
from ddp_hpc.base.errors import DataError, nearest
from ddp_hpc.data.samples import Samples


def open_samples(path: Path, *, src_key: str = SRC, tgt_key: str = TGT) -> Samples:
    """Opens a `.h5`, `.hdf5`, `.pt` or `.safetensors` file and checks it without reading its samples.

    The file is closed again after the check. The first `read` in each process opens its own handle.

    Raises:
        DataError: the file is missing, damaged or truncated, or its two arrays differ in length.
    """
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise DataError(
            f"{path}: unknown suffix {suffix!r}{nearest(suffix, SUFFIXES)}; expected one of "
            f"{' '.join(SUFFIXES)}. Use `python -m data_gen convert` for .npy and .npz files."
        )
    check_readable_file(path)
    if suffix == PT_SUFFIX:
        from ddp_hpc.data.tensor_files import open_pt

        return open_pt(path, src_key, tgt_key)
    if suffix == SAFETENSORS_SUFFIX:
        from ddp_hpc.data.tensor_files import open_safetensors

        return open_safetensors(path, src_key, tgt_key)
    assert suffix in HDF5_SUFFIXES
    from ddp_hpc.data.hdf5 import open_hdf5

    return open_hdf5(path, src_key, tgt_key)


def check_matches(
    samples: Samples,
    src_shape: tuple[int, ...] | None = None,
    tgt_shape: tuple[int, ...] | None = None,
    dtype: str | None = None,
) -> None:
    """Raises DataError if the shapes or dtype of the file differ from those requested.

    Shapes are those of one sample. The dtype applies to src, and also to tgt unless
    tgt contains integers, which are class indices. None matches anything.
    """
    for option, info, requested in (
        ("--src-shape", samples.src, src_shape),
        ("--tgt-shape", samples.tgt, tgt_shape),
    ):
        if requested is not None and tuple(requested) != info.shape:
            given, actual = (",".join(map(str, shape)) or "()" for shape in (requested, info.shape))
            raise DataError(
                f"{samples.path}: samples of {info.key} have shape {actual}, but {option} is {given}. "
                f"Omit {option} or use another file."
            )
    if dtype is None:
        return
    for info in (samples.src, samples.tgt):
        if info is samples.tgt and info.dtype.kind != "f" and not info.bfloat16:
            continue
        if info.dtype_name != dtype:
            raise DataError(
                f"{samples.path}: {info.key} has dtype {info.dtype_name}, but --dtype is {dtype}. "
                "Omit --dtype or use another file."
            )


def check_readable_file(path: Path) -> os.stat_result:
    """Returns the status of a regular file that can be read. Opening a pipe, for example, could block.

    Raises:
        DataError: the path does not exist, is not a regular file, or cannot be read.
    """
    try:
        status = path.stat()
    except FileNotFoundError:
        if path.parent.is_dir():
            hint = nearest(path.name, _names(path.parent))
        else:
            hint = f" (the directory {path.parent} does not exist)"
        raise DataError(
            f"no such file: {path}{hint}; check the name, or create the file with `python -m data_gen`"
        ) from None
    except OSError as error:
        raise DataError(f"cannot access {path}: {error.strerror}; check the name and permissions") from error
    if stat.S_ISDIR(status.st_mode):
        inside = sorted(name for name in _names(path) if name.endswith(SUFFIXES))
        raise DataError(
            f"{path} is a directory; a file is required{', such as ' + inside[0] if inside else ''}"
        )
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"{path} is not a regular file; a data file is required")
    try:
        # Some of the libraries report a file without read permission as missing.
        path.open("rb").close()
    except OSError as error:
        raise DataError(
            f"no permission to read {path}: {error.strerror}; change its permissions, or use another file"
        ) from error
    return status


def _names(directory: Path) -> list[str]:
    """Returns the names in the directory, or an empty list if it cannot be read."""
    try:
        return [entry.name for entry in directory.iterdir()]
    except OSError:
        return []
