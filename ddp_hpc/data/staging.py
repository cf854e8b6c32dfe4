"""Makes a verified copy of a data file on node-local storage; used by one process per node."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ddp_hpc.base.atomic_files import move_into_place, partial_file, remove_leftovers
from ddp_hpc.base.errors import DdpHpcError
from ddp_hpc.base.private_directory import others_can_replace_files
from ddp_hpc.base.units import format_bytes

_WRITER = "stage"
_BLOCK_BYTES = 8 * 1024 * 1024
# Space to leave free: other programs also write to this storage, and a full /tmp affects more than this job.
_MARGIN_BYTES = 64 * 1024 * 1024


class NotStagedError(DdpHpcError):
    """The file was not copied and no partial copy remains; the original can still be read."""


@dataclass(frozen=True)
class Staged:
    """A complete copy, byte for byte equal to the source."""

    path: Path
    reused: bool
    """Whether the copy already existed, so that nothing was copied."""
    num_bytes: int
    elapsed_s: float


def stage_file(
    source: Path, directory: Path, *, progress: Callable[[int, int], None] | None = None
) -> Staged:
    """Copies `source` to `directory`, which is created if necessary, unless a valid copy exists.

    The name of the copy contains a digest of the source's real path, inode, size and
    modification time, so that the next run in the same job reuses it and no other file has
    the same name. The copy has a hidden name until it has been read back from the disk and
    its CRC-32 matches that of the source. It then gets the modification time of the source,
    so that a copy which was written to later is not reused. `progress(done_bytes,
    total_bytes)` is called while copying. Uses one block of 8 MiB of memory.

    Raises:
        NotStagedError: there is no space or no permission, the copy differs, or the source changed meanwhile.
    """
    started = time.monotonic()
    try:
        before = source.stat()
        directory.mkdir(parents=True, exist_ok=True)
        if others_can_replace_files(directory):
            raise NotStagedError(
                f"other users can replace files in {directory}, including the copy of the data; use a "
                "directory that belongs to you"
            )
        remove_leftovers(directory, _WRITER)
        target = directory / _copy_name(source, before)
        reused = _is_own_copy(target, before)
        if not reused:
            _check_space(directory, before.st_size)
            with partial_file(target, _WRITER) as partial:
                expected = _copy(source, partial, before.st_size, progress)
                if _identity(source.stat()) != _identity(before):
                    raise NotStagedError(f"{source} changed while it was copied")
                if _read_back(partial) != expected:
                    raise NotStagedError(
                        f"the copy in {directory} differs from {source} when it is read again"
                    )
                os.utime(partial, ns=(before.st_atime_ns, before.st_mtime_ns))
                try:
                    move_into_place(partial, target, replace=False)
                except FileExistsError:
                    # Another job has finished the same copy first, and may already be reading it.
                    if not _is_own_copy(target, before):
                        partial.replace(target)
    except OSError as error:
        raise NotStagedError(f"copying failed: {error}") from error
    return Staged(target, reused, before.st_size, time.monotonic() - started)


def _copy_name(source: Path, status: os.stat_result) -> str:
    key = f"{os.path.realpath(source)}\0{status.st_ino}\0{status.st_size}\0{status.st_mtime_ns}"
    digest = hashlib.sha256(os.fsencode(key)).hexdigest()[:16]
    # A file name is limited to 255 bytes, which may be as few as 63 characters.
    return f"{source.stem[:48]}-{digest}{source.suffix}"


def _identity(status: os.stat_result) -> tuple[int, int, int, int]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _is_own_copy(target: Path, source: os.stat_result) -> bool:
    """Returns whether `target` is a complete copy that belongs to this user.

    In a shared directory such as /tmp, another user may have created a file of that name.
    """
    try:
        status = target.lstat()
    except FileNotFoundError:
        return False
    return (
        stat.S_ISREG(status.st_mode)
        and status.st_uid == os.geteuid()
        and (status.st_size, status.st_mtime_ns) == (source.st_size, source.st_mtime_ns)
    )


def _check_space(directory: Path, size: int) -> None:
    needed_bytes = size + size // 100 + _MARGIN_BYTES
    free_bytes = shutil.disk_usage(directory).free
    if free_bytes < needed_bytes:
        raise NotStagedError(
            f"{directory} has {format_bytes(free_bytes)} free, but {format_bytes(needed_bytes)} are required"
        )


def _copy(
    source: Path, partial: Path, size: int, progress: Callable[[int, int], None] | None
) -> tuple[int, int]:
    """Copies the source, readable by this user only; returns the size and CRC-32 of the bytes read."""
    done_bytes, crc = 0, 0
    buffer = memoryview(bytearray(_BLOCK_BYTES))
    fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "wb", buffering=0) as copy, source.open("rb", buffering=0) as original:
        # If the source grows meanwhile, the copy ends after its initial size; the caller detects the change.
        while done_bytes <= size and (count := original.readinto(buffer)):
            block = buffer[:count]
            crc = zlib.crc32(block, crc)
            while block:
                block = block[copy.write(block) :]
            done_bytes += count
            if progress is not None:
                progress(done_bytes, size)
        os.fsync(fd)
    return done_bytes, crc


def _read_back(partial: Path) -> tuple[int, int]:
    """Returns the size and CRC-32 of the bytes on the disk."""
    done_bytes, crc = 0, 0
    buffer = memoryview(bytearray(_BLOCK_BYTES))
    with partial.open("rb", buffering=0) as copy:
        # Drop the page cache, because reading from the cache would not verify the data on the disk.
        os.posix_fadvise(copy.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while count := copy.readinto(buffer):
            crc = zlib.crc32(buffer[:count], crc)
            done_bytes += count
    return done_bytes, crc
