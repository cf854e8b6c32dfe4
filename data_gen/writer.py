"""A file that is complete or not there at all: reuse, refusal, temporary name, rename."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TypeAlias

from numpy.typing import NDArray

from data_gen.formats import Contents, ForeignFileError, format_of, lay_out, read_stamp
from ddp_hpc.errors import DdpHpcError, RequestError
from ddp_hpc.units import format_bytes

# Name of an array, first element of it (flat), C-contiguous values from there on.
Piece: TypeAlias = tuple[str, int, NDArray[Any]]
Progress: TypeAlias = Callable[[int, int], None]

# What HDF5, zip and safetensors add around the arrays, generously.
_OVERHEAD_BYTES = 64 * 1024
_WRITE_BYTES = 8 * 1024 * 1024
_PARTIAL = re.compile(r"\..+\.data_gen-(?P<host>.+)-(?P<pid>\d+)\.partial")


@dataclass(frozen=True)
class GenerateResult:
    """What came of a request for a file."""

    path: Path
    reused: bool
    """A complete file with an equal fingerprint was there; nothing was written."""
    num_bytes: int
    """Size of the file on disk."""
    elapsed_s: float


def write_file(
    path: Path,
    contents: Contents,
    pieces: Callable[[], Iterable[Piece]],
    *,
    force: bool = False,
    progress: Progress | None = None,
) -> GenerateResult:
    """A finished file of these contents at `path`; `pieces()` yields every element once.

    Raises:
        RequestError: unknown suffix, too little space, or another file at `path` and not `force`.
        DdpHpcError: the writing itself failed; nothing is left behind.
    """
    started = time.monotonic()
    suffix = format_of(path)
    # A link at `path` is followed: it is the file behind it that is replaced.
    target = Path(os.path.realpath(path))
    _refuse_no_file(path, target)
    if not force and _is_there(path, target, suffix, contents):
        return GenerateResult(path, True, target.stat().st_size, time.monotonic() - started)
    _prepare_folder(path, target.parent, contents.num_bytes + _OVERHEAD_BYTES)
    try:
        with _new_file(target) as partial:
            offsets = lay_out(partial, suffix, contents)
            _fill(partial, contents, offsets, pieces(), progress)
            # Somebody may have put a file there in the meantime.
            if not force and _is_there(path, target, suffix, contents):
                return GenerateResult(path, True, target.stat().st_size, time.monotonic() - started)
            _sync(partial)
            partial.replace(target)
        with contextlib.suppress(OSError):  # The file is in place; some file systems cannot sync a folder.
            _sync(target.parent)
        return GenerateResult(path, False, target.stat().st_size, time.monotonic() - started)
    # HDF5 reports a full disk as either.
    except (OSError, RuntimeError) as error:
        raise DdpHpcError(
            f"{path} was not written: {error}; {target.parent} needs {format_bytes(contents.num_bytes)}; "
            "nothing is left behind; free space there or name a file in another folder"
        ) from error


def _refuse_no_file(path: Path, target: Path) -> None:
    try:
        if target.is_dir():
            raise RequestError(f"{path} is a folder; name a file in it")
        if target.exists() and not target.is_file():
            raise RequestError(f"{path} is not a regular file; name another")
    except OSError as error:
        raise RequestError(f"{path} cannot be looked at: {error}; name a file in another folder") from error


def _is_there(path: Path, target: Path, suffix: str, contents: Contents) -> bool:
    """Whether a complete file of these contents is there already; any other file is refused."""
    if not target.exists():
        return False
    ways_out = "name another file, remove this one, or overwrite it with `python -m data_gen --force`"
    try:
        stamp = read_stamp(target, suffix)
    except ForeignFileError as error:
        raise RequestError(
            f"{path} exists and is not a file that data_gen wrote, or a damaged one ({error}); {ways_out}"
        ) from error
    if stamp.recipe != contents.recipe:
        keys = sorted({*stamp.recipe, *contents.recipe})
        differences = ", ".join(
            f"{key} {_shown(stamp.recipe.get(key))} there and {_shown(contents.recipe.get(key))} asked for"
            for key in keys
            if stamp.recipe.get(key) != contents.recipe.get(key)
        )
        raise RequestError(f"{path} exists and holds other data: {differences}; {ways_out}")
    size = target.stat().st_size
    if stamp.arrays != contents.arrays or size < stamp.end:
        arrays = ", ".join(f"{array.name} {array.shape} {array.dtype}" for array in stamp.arrays)
        raise RequestError(
            f"{path} has the recipe asked for but is damaged: it holds {arrays or 'no array'} "
            f"in {size} bytes of {stamp.end}; {ways_out}"
        )
    return True


def _shown(value: object) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value))
    return "nothing" if value is None else str(value)


def _prepare_folder(path: Path, folder: Path, needed_bytes: int) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_stale(folder)
        free_bytes = shutil.disk_usage(folder).free
    except OSError as error:
        raise RequestError(f"no folder for {path}: {error}; name a file in another folder") from error
    if free_bytes < needed_bytes:
        raise RequestError(
            f"{path} needs {format_bytes(needed_bytes)} and {folder} has {format_bytes(free_bytes)} free; "
            "free space, ask for fewer samples, or name a file in another folder"
        )


def _remove_stale(folder: Path) -> None:
    """Remove what killed writers of this host left; one process writes one file at a time."""
    for entry in folder.iterdir():
        match = _PARTIAL.fullmatch(entry.name)
        if match and match["host"] == socket.gethostname() and not _is_other_process(int(match["pid"])):
            entry.unlink(missing_ok=True)


def _is_other_process(pid: int) -> bool:
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


@contextlib.contextmanager
def _new_file(target: Path) -> Iterator[Path]:
    """A hidden name beside `target`, gone afterwards unless it was renamed, also on SIGTERM and Ctrl-C."""
    partial = target.with_name(f".{target.name}.data_gen-{socket.gethostname()}-{os.getpid()}.partial")
    with _end_by_signal():
        try:
            yield partial
        finally:
            partial.unlink(missing_ok=True)


class _Stopped(BaseException):
    """A signal that would have ended the process at once."""


@contextlib.contextmanager
def _end_by_signal() -> Iterator[None]:
    """Let SIGTERM and SIGHUP unwind the stack first, then end the process as they would have.

    A handler that the program has set keeps the signal: a trainer's flag decides there.
    """
    ours: list[signal.Signals] = []
    stopped_by: list[int] = []

    def stop(signum: int, _: FrameType | None) -> None:
        if not stopped_by:  # A second signal must not interrupt the cleaning up.
            stopped_by.append(signum)
            raise _Stopped

    try:
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(signum) is signal.SIG_DFL:
                    ours.append(signum)
                    signal.signal(signum, stop)
        yield
    finally:
        for signum in ours:
            signal.signal(signum, signal.SIG_DFL)
        if stopped_by:
            os.kill(os.getpid(), stopped_by[0])


def _fill(
    partial: Path,
    contents: Contents,
    offsets: dict[str, int],
    pieces: Iterable[Piece],
    progress: Progress | None,
) -> None:
    total_bytes = contents.num_bytes
    done_bytes = 0
    fd = os.open(partial, os.O_WRONLY)
    try:
        for name, first, values in pieces:
            data = values.data.cast("B")
            position = offsets[name] + first * values.itemsize
            while data:
                written = os.pwrite(fd, data[:_WRITE_BYTES], position)
                data, position, done_bytes = data[written:], position + written, done_bytes + written
                if progress is not None:
                    progress(done_bytes, total_bytes)
    finally:
        os.close(fd)
    assert done_bytes == total_bytes, f"{done_bytes} of {total_bytes} bytes were produced"


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
