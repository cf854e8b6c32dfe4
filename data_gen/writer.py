"""Writes a file atomically."""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from numpy.typing import NDArray

from data_gen.check_output_file import WRITER, OutputFile
from data_gen.formats import Contents, format_of, lay_out
from ddp_hpc.base.atomic_files import move_into_place, partial_file, sync_to_disk
from ddp_hpc.base.errors import DdpHpcError
from ddp_hpc.base.units import format_bytes

# A part of an array: the array's name, the flat index of the first element, and the C-contiguous values.
Chunk: TypeAlias = tuple[str, int, NDArray[Any]]
Progress: TypeAlias = Callable[[int, int], None]

# The number of chunks that may be waiting to be written while the next one is generated; a generator
# that reuses its buffers needs one more than this.
CHUNKS_IN_FLIGHT = 2

_WRITE_BYTES = 8 * 1024 * 1024
# The first bytes of a file identify its format. They are written last, so that the partial file of a killed
# writer is not a valid file, even if someone renames it.
_HEAD_BYTES = 8


@dataclass(frozen=True)
class GenerateResult:
    """The result of writing a file."""

    path: Path
    reused: bool
    """Whether a complete file with an equal fingerprint already existed, so that nothing was written."""
    num_bytes: int
    """Size of the file on disk."""
    elapsed_s: float


def write_file(
    path: Path,
    contents: Contents,
    chunks: Callable[[], Iterable[Chunk]],
    *,
    force: bool = False,
    progress: Progress | None = None,
) -> GenerateResult:
    """Writes a file, which gets its final name when it is on disk.

    `chunks()` yields every element once. A thread writes while the next chunk is generated, so the values of
    a chunk must not be modified until CHUNKS_IN_FLIGHT more chunks have been requested.

    Raises:
        RequestError: the suffix is unknown, there is too little space, or another file exists and `force`
            is not set.
        DdpHpcError: writing failed; no partial file is left.
    """
    started = time.monotonic()
    target = OutputFile(path, contents, force)
    suffix = format_of(path)
    target.check_regular_file()
    reused = target.exists()
    if not reused:
        target.prepare_directory()
        with partial_file(target.file, WRITER) as partial, _as_one_error(target):
            offsets = lay_out(partial, suffix, contents)
            with partial.open("r+b", buffering=0) as file:
                head = file.read(_HEAD_BYTES)
                os.pwrite(file.fileno(), bytes(_HEAD_BYTES), 0)
                done_bytes = _fill(file.fileno(), offsets, chunks(), contents.num_bytes, progress)
                assert done_bytes == contents.num_bytes, f"{done_bytes} bytes were written to {path}"
                os.fsync(file.fileno())
                os.pwrite(file.fileno(), head, 0)
                os.fsync(file.fileno())
            reused = _is_made_by_another(target, partial)
    with _as_one_error(target):
        num_bytes = target.file.stat().st_size
    return GenerateResult(path, reused, num_bytes, time.monotonic() - started)


@contextlib.contextmanager
def _as_one_error(target: OutputFile) -> Iterator[None]:
    try:
        yield
    # On a full disk, HDF5 raises OSError or RuntimeError.
    except (OSError, RuntimeError) as error:
        needed = format_bytes(target.contents.num_bytes)
        raise DdpHpcError(
            f"{target.path} was not written: {error}. No partial file is left. "
            f"Free {needed} in {target.file.parent} or use another directory."
        ) from error


def _is_made_by_another(target: OutputFile, partial: Path) -> bool:
    """Renames the complete file; returns whether another process has made the same file meanwhile."""
    # If it does so after this check, `move_into_place` raises FileExistsError.
    if target.exists():
        return True
    try:
        move_into_place(partial, target.file, replace=target.force)
    except FileExistsError:
        if not target.exists():
            raise
        return True
    # The file is in place. Some file systems cannot sync a directory.
    with contextlib.suppress(OSError):
        sync_to_disk(target.file.parent)
    return False


def _fill(
    fd: int,
    offsets: Mapping[str, int],
    chunks: Iterable[Chunk],
    total_bytes: int,
    progress: Progress | None,
) -> int:
    """Writes the chunks at the offsets of their arrays, and returns the number of bytes written."""
    done_bytes = 0
    pending: deque[Future[int]] = deque()

    def wait_for_writes(most_pending: int) -> None:
        nonlocal done_bytes
        while len(pending) > most_pending:
            done_bytes += pending.popleft().result()
            if progress is not None:
                progress(done_bytes, total_bytes)

    with ThreadPoolExecutor(1) as disk:
        for name, first, values in chunks:
            position = offsets[name] + first * values.itemsize
            pending.append(disk.submit(_write, fd, values.data.cast("B"), position))
            wait_for_writes(CHUNKS_IN_FLIGHT)
        wait_for_writes(0)
    return done_bytes


def _write(fd: int, data: memoryview, position: int) -> int:
    left, end = data, position + len(data)
    while left:
        written = os.pwrite(fd, left[:_WRITE_BYTES], end - len(left))
        left = left[written:]
    # This starts the transfer of the pages to the disk now instead of at the end. Pages that have not been
    # transferred yet remain in memory for the first reader.
    with contextlib.suppress(OSError):
        os.posix_fadvise(fd, position, len(data), os.POSIX_FADV_DONTNEED)
    return len(data)
