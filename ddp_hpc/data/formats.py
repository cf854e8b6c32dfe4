"""Data files by suffix: `open_samples` for what is in one, `check_matches` for what was asked for."""

from __future__ import annotations

import stat
from pathlib import Path

from ddp_hpc.data.samples import Samples
from ddp_hpc.errors import DataError, nearest
from ddp_hpc.h5_layout import HDF5_SUFFIXES, PT_SUFFIX, SAFETENSORS_SUFFIX, SRC, SUFFIXES, TGT

__all__ = ["Samples", "check_matches", "open_samples"]


def open_samples(path: Path, *, src_key: str = SRC, tgt_key: str = TGT) -> Samples:
    """The samples of a `.h5`, `.hdf5`, `.pt` or `.safetensors` file, checked but not read.

    The file is opened shortly to be checked; samples are read through a handle
    that the first `read` of each process opens.

    Raises:
        DataError: the file is missing, damaged, cut short, or not two arrays of equally many samples.
    """
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise DataError(
            f"{path}: the suffix {suffix!r} names no format{nearest(suffix, SUFFIXES)}; "
            f"one of {' '.join(SUFFIXES)} is needed; for .npy, .npz and IDX see `python -m data_gen convert`"
        )
    _check_file(path)
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
    """Raises DataError where the file has other shapes or another dtype than the user asked for.

    Shapes are those of one sample. The dtype is src's, and tgt's unless tgt holds
    integers: class numbers stay class numbers. None asks for nothing.
    """
    for option, info, wanted in (
        ("--src-shape", samples.src, src_shape),
        ("--tgt-shape", samples.tgt, tgt_shape),
    ):
        if wanted is not None and tuple(wanted) != info.shape:
            given, there = (",".join(map(str, shape)) or "()" for shape in (wanted, info.shape))
            raise DataError(
                f"{samples.path}: samples of {info.key} have shape {there} and {option} {given} was asked "
                f"for; leave {option} out, or name another file"
            )
    if dtype is None:
        return
    for info in (samples.src, samples.tgt):
        if info is samples.tgt and info.dtype.kind != "f" and not info.bfloat16:
            continue
        if info.dtype_name != dtype:
            raise DataError(
                f"{samples.path}: {info.key} is {info.dtype_name} and --dtype {dtype} was asked for; "
                "leave --dtype out, or name another file"
            )


def _check_file(path: Path) -> None:
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        folder = path.parent
        hint = nearest(path.name, _names(folder)) if folder.is_dir() else f", not even the folder {folder}"
        raise DataError(
            f"there is no file {path}{hint}; name one with --data, or write one with python -m data_gen"
        ) from None
    except OSError as error:
        raise DataError(f"{path} cannot be looked at: {error}; check the name and its permissions") from error
    if stat.S_ISDIR(mode):
        inside = sorted(name for name in _names(path) if name.endswith(SUFFIXES))
        raise DataError(f"{path} is a folder; name a file{', such as ' + inside[0] if inside else ''}")
    if not stat.S_ISREG(mode):
        raise DataError(f"{path} is not a regular file; name one that holds samples")
    try:
        # Some of the libraries would say that there is no such file.
        path.open("rb").close()
    except OSError as error:
        raise DataError(
            f"{path} may not be read by this user: {error.strerror}; chmod or chown it, or name another file"
        ) from error


def _names(folder: Path) -> list[str]:
    """What lies in the folder, as far as this user may know."""
    try:
        return [entry.name for entry in folder.iterdir()]
    except OSError:
        return []
