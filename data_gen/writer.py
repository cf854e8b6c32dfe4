"""Writes a file atomically, by one process or by several ranks."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from numpy.typing import NDArray

from data_gen.check_output_file import OutputFile
from data_gen.formats import Contents, format_of, lay_out
from data_gen.signals_during_write import WRITER, end_by_signal, signals_held
from ddp_hpc.base.atomic_files import move_into_place, partial_file, sync_to_disk
from ddp_hpc.base.errors import DdpHpcError, failure_of, stop_together
from ddp_hpc.base.units import format_bytes
from ddp_hpc.discovery.rank_communication import Comm, SingleComm

T = TypeVar("T")
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


@dataclass(frozen=True)
class _Partial:
    """An unfinished file with space for its arrays. Rank 0 sends it to the other ranks, as JSON types."""

    path: str
    offsets: dict[str, int]
    """Byte offsets of the arrays in the file, by name."""
    head: str
    """The first bytes of the file in hex, which are written last."""


def write_file(
    path: Path,
    contents: Contents,
    chunks: Callable[[], Iterable[Chunk]],
    *,
    force: bool = False,
    progress: Progress | None = None,
    comm: Comm | None = None,
) -> GenerateResult:
    """Writes a file, which gets its final name when it is on disk.

    `chunks()` yields every element once. With a `comm`, this function is collective: every
    rank must call it with the same arguments. The `chunks()` of all ranks together then yield
    every element once; no rank yields more than rank 0, which calls `progress`. A thread
    writes while the next chunk is generated, so the values of a chunk must not be modified
    until CHUNKS_IN_FLIGHT more chunks have been requested.

    Raises:
        RequestError: the suffix is unknown, there is too little space, or another file exists and `force`
            is not set.
        DdpHpcError: writing failed; no partial file is left.
        ReportedElsewhereError: raised on the other ranks if rank 0 raises one of these.
    """
    comm = SingleComm() if comm is None else comm
    started = time.monotonic()
    target = OutputFile(path, contents, force)
    leads = comm.rank == 0
    partial: _Partial | None = None

    def rank_0_is_done() -> bool:
        return leads or (partial is not None and not os.path.lexists(partial.path))

    with contextlib.ExitStack() as cleanup:
        cleanup.enter_context(end_by_signal(rank_0_is_done))
        # Wait until all ranks have installed the handler: a signal ends a rank without it immediately, and
        # launchers then kill rank 0 before it has removed the partial file.
        comm.barrier("the other ranks to start writing the file")
        fields = _together(comm, lambda: _begin(target, cleanup) if leads else None)[0]
        if fields is not None:
            partial = new = _Partial(*fields)
            done_bytes = _together(
                comm, lambda: _fill(target, new, chunks(), progress if leads else None, comm)
            )
            assert sum(done_bytes) == contents.num_bytes, f"{done_bytes} bytes were written to {path}"
        reused, num_bytes = _together(comm, lambda: _finish(target, partial) if leads else (True, 0))[0]
    return GenerateResult(path, reused, num_bytes, time.monotonic() - started)


def _together(comm: Comm, action: Callable[[], T]) -> list[T]:
    """Runs `action` and returns the results of all ranks, by rank. Collective: every rank must call this.

    Raises:
        DdpHpcError: on rank 0, the first error of any rank; the others raise ReportedElsewhereError.
    """
    value, own = None, None
    try:
        value = action()
    except DdpHpcError as error:
        own = error
    outcomes = comm.allgather((value, str(own or ""), own.cause if own else ""))
    for rank, (_, text, cause) in enumerate(outcomes):
        if cause:
            stop_together(
                comm.rank, own if own is not None and rank == comm.rank else failure_of(text, cause)
            )
    return [value for value, _, _ in outcomes]  # type: ignore[misc]  # every value is a T if there was no error


@contextlib.contextmanager
def _as_one_error(target: OutputFile, where: str = "") -> Iterator[None]:
    try:
        yield
    # On a full disk, HDF5 raises OSError or RuntimeError.
    except (OSError, RuntimeError) as error:
        needed = format_bytes(target.contents.num_bytes)
        raise DdpHpcError(
            f"{target.path} was not written{where}: {error}. No partial file is left. "
            f"Free {needed} in {target.file.parent} or use another directory."
        ) from error


def _begin(target: OutputFile, cleanup: contextlib.ExitStack) -> tuple[Any, ...] | None:
    """Creates the partial file on rank 0 and returns the fields of `_Partial`; `cleanup` removes the file.

    Returns None if a complete file exists.
    """
    suffix = format_of(target.path)
    target.check_regular_file()
    if target.exists():
        return None
    target.prepare_directory()
    path = cleanup.enter_context(partial_file(target.file, WRITER))
    with _as_one_error(target):
        with signals_held():
            offsets = lay_out(path, suffix, target.contents)
        with path.open("r+b", buffering=0) as file:
            head = file.read(_HEAD_BYTES)
            os.pwrite(file.fileno(), bytes(_HEAD_BYTES), 0)
    return astuple(_Partial(str(path), offsets, head.hex()))


def _finish(target: OutputFile, partial: _Partial | None) -> tuple[bool, int]:
    """Completes and renames the file on rank 0; returns whether an existing one is used, and the size."""
    with _as_one_error(target):
        if partial is None:
            return True, target.file.stat().st_size
        with Path(partial.path).open("r+b", buffering=0) as file:
            os.pwrite(file.fileno(), bytes.fromhex(partial.head), 0)
            os.fsync(file.fileno())
        # Another process may create the same file at any time. If it does so after this check,
        # `move_into_place` raises FileExistsError.
        reused = target.exists()
        if not reused:
            try:
                move_into_place(Path(partial.path), target.file, replace=target.force)
            except FileExistsError:
                if not target.exists():
                    raise
                reused = True
            # The file is in place. Some file systems cannot sync a directory.
            with contextlib.suppress(OSError):
                sync_to_disk(target.file.parent)
        return reused, target.file.stat().st_size


def _fill(
    target: OutputFile, partial: _Partial, chunks: Iterable[Chunk], progress: Progress | None, comm: Comm
) -> int:
    """Writes the chunks of this rank to the disk, and returns the number of bytes written."""
    total_bytes = target.contents.num_bytes
    done_bytes = 0
    pending: deque[Future[int]] = deque()

    def wait_for_writes(most_pending: int) -> None:
        nonlocal done_bytes
        while len(pending) > most_pending:
            done_bytes += pending.popleft().result()
            if progress is not None:
                # Only rank 0 reports progress. No other rank writes more than rank 0, so the estimate may be
                # slightly too high.
                progress(min(done_bytes * comm.size, total_bytes), total_bytes)

    where = "" if comm.size == 1 else f" by rank {comm.rank} on {socket.gethostname()}"
    with _as_one_error(target, where), _opened(target, partial.path, comm.rank) as fd:
        with ThreadPoolExecutor(1) as disk:
            for name, first, values in chunks:
                position = partial.offsets[name] + first * values.itemsize
                pending.append(disk.submit(_write, fd, values.data.cast("B"), position))
                wait_for_writes(CHUNKS_IN_FLIGHT)
            wait_for_writes(0)
        os.fsync(fd)
    return done_bytes


@contextlib.contextmanager
def _opened(target: OutputFile, partial: str, rank: int) -> Iterator[int]:
    try:
        fd = os.open(partial, os.O_WRONLY)
    except FileNotFoundError as error:
        raise DdpHpcError(
            f"{target.path} was not written: rank {rank} on {socket.gethostname()} cannot find the partial "
            "file that rank 0 created. Use a directory that all nodes share, or start one process."
        ) from error
    try:
        yield fd
    finally:
        os.close(fd)


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
