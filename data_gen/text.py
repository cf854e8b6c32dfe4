"""Converts text files to samples for next-byte prediction: tgt is src shifted by one byte.

The files, sorted by path, are concatenated with a zero byte after each. The text is divided into
windows of length + 1 bytes that do not overlap: the first `length` bytes of a window are src, the
last `length` bytes are tgt. The test samples therefore share no byte with the training samples.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from data_gen.formats import Array, Contents
from data_gen.writer import Chunk, GenerateResult, Progress, write_file
from ddp_hpc.base import data_file_layout
from ddp_hpc.base.errors import DataError, RequestError
from ddp_hpc.data.open_file import check_readable_file

SUFFIX = ".txt"
LENGTH = 128
TEST_SHARE = 0.05
NUM_TOKENS = 256
END_OF_FILE = b"\0"
# The test samples come from this number of sections, evenly spaced over the text, because the end of a text
# alone would not be representative. They are sections and not single samples, because adjacent training
# samples would be similar to them.
_TEST_BLOCKS = 10
_MAX_TEST_SHARE = 0.5
_CHUNK_BYTES = 1024 * 1024

_Windows: TypeAlias = NDArray[np.uint8]  # (windows, length + 1)


def write_text(
    inputs: Sequence[Path],
    path: Path,
    *,
    length: int = LENGTH,
    test_share: float = TEST_SHARE,
    suffixes: Sequence[str] = (SUFFIX,),
    exclude: Sequence[str] = (),
    force: bool = False,
    progress: Progress | None = None,
) -> GenerateResult:
    """Writes src and tgt (N, length) uint8 of the bytes of `inputs`, with `test_share` of them in `test/`.

    For a directory, all files with one of `suffixes` are read, except in subdirectories named in
    `exclude`. A file is read only once, even if it is passed several times. The result depends on the
    text and not on the location of the files. The text is read twice, a few megabytes at a time.

    Raises:
        DataError: an input is missing, empty or unreadable, or the text is shorter than a sample.
        RequestError: an argument is out of range, or `data_gen.generate` would raise it for this output.
        DdpHpcError: writing failed; no partial file is left.
    """
    if length < 1:
        raise RequestError(f"--length must be at least 1 (got {length})")
    if not 0 <= test_share <= _MAX_TEST_SHARE:
        raise RequestError(f"--test-share must be in the range 0 to {_MAX_TEST_SHARE} (got {test_share})")
    files = find_files(inputs, suffixes, exclude)
    digest = hashlib.sha256()
    num_bytes = sum(len(chunk) for chunk in _stream(files, digest))
    num_samples, num_test = _count_samples(num_bytes, length, test_share)
    contents = Contents(
        arrays=_arrays(num_samples, num_test, length),
        recipe={
            "kind": "text",
            "sha256": digest.hexdigest(),
            "length": length,
            "test_share": test_share,
            "format_version": data_file_layout.FORMAT_VERSION,
        },
        attributes={
            data_file_layout.ATTR_NUM_CLASSES: NUM_TOKENS,
            data_file_layout.ATTR_SOURCE: f"{num_bytes:,} bytes of {len(files):,} text files",
        },
    )

    def chunks() -> Iterator[Chunk]:
        second_digest = hashlib.sha256()
        yield from _chunks(_windows(_stream(files, second_digest), length + 1), num_samples, num_test)
        if second_digest.hexdigest() != digest.hexdigest():
            raise DataError("the text changed while it was read; retry when no program is writing it")

    return write_file(path, contents, chunks, force=force, progress=progress)


def _count_samples(num_bytes: int, length: int, test_share: float) -> tuple[int, int]:
    """Returns the number of all samples and of the test samples.

    Raises:
        DataError: the text is shorter than a sample, or too short for a test sample.
    """
    width = length + 1
    num_samples = num_bytes // width
    if num_samples == 0:
        raise DataError(
            f"the text has only {num_bytes} bytes, but a sample of --length {length} needs {width}; "
            "add more text or reduce --length"
        )
    num_test = int(num_samples * test_share)
    if test_share and not num_test:
        raise DataError(
            f"the text has only {num_samples} samples, so --test-share {test_share} selects none of them. "
            "Add more text, reduce --length, or use --test-share 0."
        )
    return num_samples, num_test


def _arrays(num_samples: int, num_test: int, length: int) -> tuple[Array, ...]:
    nums = {data_file_layout.SRC: num_samples - num_test, data_file_layout.TGT: num_samples - num_test}
    if num_test:
        nums |= {data_file_layout.TEST_SRC: num_test, data_file_layout.TEST_TGT: num_test}
    return tuple(Array(name, (num, length), "uint8") for name, num in nums.items())


def _chunks(windows: Iterator[_Windows], num_samples: int, num_test: int) -> Iterator[Chunk]:
    first = test_first = 0
    for block in windows:
        # The files may have grown since their bytes were counted.
        numbers = np.arange(first, min(first + len(block), num_samples))
        is_test = _is_test(numbers, num_samples, num_test)
        own = block[: len(numbers)]
        yield from _pair(data_file_layout.SRC, data_file_layout.TGT, first - test_first, own[~is_test])
        yield from _pair(data_file_layout.TEST_SRC, data_file_layout.TEST_TGT, test_first, own[is_test])
        first, test_first = first + len(numbers), test_first + int(is_test.sum())


def find_files(inputs: Sequence[Path], suffixes: Sequence[str], exclude: Sequence[str]) -> list[Path]:
    """Returns the sorted real paths of the text files, without duplicates.

    Raises:
        DataError: an input does not exist or cannot be read, or a directory contains no such file.
    """
    names: set[str] = set()
    for path in inputs:
        files = [path]
        if os.path.isdir(path):  # noqa: PTH112 - Path.is_dir raises without permission
            files = _in_directory(path, suffixes, exclude)
            if not files:
                raise DataError(
                    f"{path} contains no files with the suffix {' or '.join(suffixes)}; omit it, or set "
                    "--suffix"
                )
        names |= {os.path.realpath(file) for file in files if check_readable_file(file).st_size}
    return [Path(name) for name in sorted(names)]


def _in_directory(directory: Path, suffixes: Sequence[str], exclude: Sequence[str]) -> list[Path]:
    def refuse(error: OSError) -> None:
        raise DataError(
            f"{error.filename} cannot be read: {error.strerror}; change its permissions, or exclude it with "
            "--exclude"
        )

    files = []
    for parent, subdirectories, names in os.walk(directory, onerror=refuse):
        subdirectories[:] = [name for name in subdirectories if name not in exclude]
        files += [Path(parent, name) for name in names if name.endswith(tuple(suffixes))]
    return [file for file in files if _is_regular_or_unreadable(file)]


def _is_regular_or_unreadable(file: Path) -> bool:
    """Returns False for sockets and dangling links, which editors create.

    Returns True for a file without read permission, so that reading it reports the error.
    """
    try:
        return stat.S_ISREG(file.stat().st_mode)
    except FileNotFoundError:
        return False
    except OSError:
        return True


def _stream(files: Sequence[Path], digest: hashlib._Hash) -> Iterator[bytes]:
    """Yields the text in chunks of up to a megabyte, and adds them to `digest`."""
    for path in files:
        try:
            with path.open("rb") as file:
                while chunk := file.read(_CHUNK_BYTES):
                    digest.update(chunk)
                    yield chunk
        except OSError as error:
            raise DataError(
                f"{path} cannot be read: {error.strerror}; change its permissions, or omit it"
            ) from None
        digest.update(END_OF_FILE)
        yield END_OF_FILE


def _windows(text: Iterator[bytes], width: int) -> Iterator[_Windows]:
    """Yields all complete windows of the text, about a megabyte at a time, in new arrays."""
    rest = bytearray()
    for chunk in text:
        rest += chunk
        if len(rest) >= max(width, _CHUNK_BYTES):
            yield _cut(rest, width)
            del rest[: len(rest) // width * width]
    yield _cut(rest, width)


def _cut(text: bytearray, width: int) -> _Windows:
    num = len(text) // width
    return np.frombuffer(bytes(text[: num * width]), np.uint8).reshape(num, width)


def _is_test(numbers: NDArray[np.int64], num_samples: int, num_test: int) -> NDArray[np.bool_]:
    """Returns a mask of the test samples, which are at the ends of ten equal sections of the text.

    With fewer than ten test samples, each section has one.
    """
    if not num_test:
        return np.zeros(len(numbers), bool)
    parts = np.arange(min(_TEST_BLOCKS, num_test) + 1)
    ends = num_samples * parts // parts[-1]
    sizes = np.diff(num_test * parts // parts[-1])
    stretch = np.searchsorted(ends, numbers, side="right")
    is_test: NDArray[np.bool_] = numbers >= (ends[1:] - sizes)[stretch - 1]
    return is_test


def _pair(src: str, tgt: str, first: int, windows: _Windows) -> Iterator[Chunk]:
    if len(windows):
        length = windows.shape[1] - 1
        yield src, first * length, np.ascontiguousarray(windows[:, :-1])
        yield tgt, first * length, np.ascontiguousarray(windows[:, 1:])
