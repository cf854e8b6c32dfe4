"""Converts text files to samples for next-byte prediction: tgt is src shifted by one byte.

The files, sorted by path, are concatenated with a zero byte after each. The text is divided into
windows of length + 1 bytes that do not overlap: the first `length` bytes of a window are src, the
last `length` bytes are tgt. The test samples therefore share no byte with the training samples.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from data_gen.formats import Array, Contents
from data_gen.writer import Chunk, GenerateResult, Progress, write_file
from ddp_hpc.base import data_file_layout
from ddp_hpc.base.data_file_layout import SRC, TEST_SRC, TEST_TGT, TGT
from ddp_hpc.base.errors import DataError, RequestError
from ddp_hpc.data.open_file import check_readable_file

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
    length: int = 128,
    test_share: float = 0.05,
    force: bool = False,
    progress: Progress | None = None,
) -> GenerateResult:
    """Writes src and tgt (N, length) uint8 of the bytes of `inputs`, with `test_share` of them in `test/`.

    A file is read only once, even if it is passed several times. The result depends on the text and not
    on the location of the files. The whole text is kept in memory.

    Raises:
        DataError: an input is missing, empty or unreadable, or the text is shorter than a sample.
        RequestError: an argument is out of range, or `data_gen.generate` would raise it for this output.
        DdpHpcError: writing failed; no partial file is left.
    """
    if length < 1:
        raise RequestError(f"--length must be at least 1 (got {length})")
    if not 0 <= test_share <= _MAX_TEST_SHARE:
        raise RequestError(f"--test-share must be in the range 0 to {_MAX_TEST_SHARE} (got {test_share})")
    files = _real_paths(inputs)
    text = b"".join(_read(file) + END_OF_FILE for file in files)
    num_samples, num_test = _count_samples(len(text), length, test_share)
    windows = np.frombuffer(text, np.uint8, num_samples * (length + 1)).reshape(num_samples, length + 1)
    is_test = _is_test(num_samples, num_test)
    splits = {(SRC, TGT): windows[~is_test]} | ({(TEST_SRC, TEST_TGT): windows[is_test]} if num_test else {})
    contents = Contents(
        arrays=tuple(
            Array(name, (len(split), length), "uint8") for names, split in splits.items() for name in names
        ),
        recipe={
            "kind": "text",
            "sha256": hashlib.sha256(text).hexdigest(),
            "length": length,
            "test_share": test_share,
            "format_version": data_file_layout.FORMAT_VERSION,
        },
        attributes={
            data_file_layout.ATTR_NUM_CLASSES: NUM_TOKENS,
            data_file_layout.ATTR_SOURCE: f"{len(text):,} bytes of {len(files):,} text files",
        },
    )
    return write_file(path, contents, lambda: _chunks(splits), force=force, progress=progress)


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


def _real_paths(inputs: Sequence[Path]) -> list[Path]:
    """Returns the sorted real paths of the files that are not empty, without duplicates."""
    names = {os.path.realpath(path) for path in inputs if check_readable_file(path).st_size}
    return [Path(name) for name in sorted(names)]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error.strerror}; change its permissions, or omit it"
        ) from None


def _is_test(num_samples: int, num_test: int) -> NDArray[np.bool_]:
    """Returns a mask of the test samples, which are at the ends of ten equal sections of the text.

    With fewer than ten test samples, each section has one.
    """
    is_test = np.zeros(num_samples, bool)
    num_parts = min(_TEST_BLOCKS, num_test)
    for part in range(num_parts):
        end = num_samples * (part + 1) // num_parts
        size = num_test * (part + 1) // num_parts - num_test * part // num_parts
        is_test[end - size : end] = True
    return is_test


def _chunks(splits: Mapping[tuple[str, str], _Windows]) -> Iterator[Chunk]:
    for (src, tgt), windows in splits.items():
        length = windows.shape[1] - 1
        step = max(1, _CHUNK_BYTES // length)
        for start in range(0, len(windows), step):
            block = windows[start : start + step]
            yield src, start * length, np.ascontiguousarray(block[:, :-1])
            yield tgt, start * length, np.ascontiguousarray(block[:, 1:])
