"""A verified copy of a data file on storage of the node, or the reason why there is none. No ranks here."""

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

from ddp_hpc.errors import DdpHpcError
from ddp_hpc.partial_files import give_name, partial_file, remove_leftovers
from ddp_hpc.units import format_bytes

_WRITER = "stage"
_BLOCK_BYTES = 8 * 1024 * 1024
# Others write to the node's storage too, and a full /tmp harms more than this job.
_MARGIN_BYTES = 64 * 1024 * 1024


class NotStagedError(DdpHpcError):
    """There is no copy, and nothing was left of it; the file itself can be read as before."""


@dataclass(frozen=True)
class Staged:
    """A complete copy, equal to the source byte for byte."""

    path: Path
    reused: bool
    """It was there already; nothing was copied."""
    num_bytes: int
    elapsed_s: float


def stage_file(source: Path, folder: Path, *, progress: Callable[[int, int], None] | None = None) -> Staged:
    """A copy of `source` in `folder`, which is made where it is missing.

    The copy is named after the source and a digest of its real path, inode, size and
    time of change: the next run in the same job uses it again, and another file never
    meets its name. Nobody sees half a copy: it has a hidden name until it has been
    read back from the disk and has the source's CRC-32. Then it gets the source's time
    of change, so one that anybody wrote to later is not used again. `progress(done_bytes,
    total_bytes)` is called while copying. Memory: one block of 8 MiB.

    Raises:
        NotStagedError: no space, no permission, a copy that differs, a source that changed meanwhile.
    """
    started = time.monotonic()
    try:
        before = source.stat()
        folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder, _WRITER)
        target = folder / _copy_name(source, before)
        reused = _is_own_copy(target, before)
        if not reused:
            _check_space(folder, before.st_size)
            with partial_file(target, _WRITER) as partial:
                wanted = _copy(source, partial, before.st_size, progress)
                if _identity(source.stat()) != _identity(before):
                    raise NotStagedError(f"{source} changed while it was copied")
                if _read_back(partial) != wanted:
                    raise NotStagedError(f"the copy in {folder} differs from {source} when it is read back")
                os.utime(partial, ns=(before.st_atime_ns, before.st_mtime_ns))
                try:
                    give_name(partial, target, replace=False)
                except FileExistsError:
                    # Another job may have been faster, and read from its copy by now.
                    if not _is_own_copy(target, before):
                        partial.replace(target)
    except OSError as error:
        raise NotStagedError(f"copying failed: {error}") from error
    return Staged(target, reused, before.st_size, time.monotonic() - started)


def _copy_name(source: Path, status: os.stat_result) -> str:
    key = f"{os.path.realpath(source)}\0{status.st_ino}\0{status.st_size}\0{status.st_mtime_ns}"
    digest = hashlib.sha256(os.fsencode(key)).hexdigest()[:16]
    # A name ends at 255 bytes, which may be 63 characters.
    return f"{source.stem[:48]}-{digest}{source.suffix}"


def _identity(status: os.stat_result) -> tuple[int, int, int, int]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _is_own_copy(target: Path, source: os.stat_result) -> bool:
    """Whether a whole copy of this user's is there: in /tmp others may have put something under its name."""
    try:
        status = target.lstat()
    except FileNotFoundError:
        return False
    return (
        stat.S_ISREG(status.st_mode)
        and status.st_uid == os.geteuid()
        and (status.st_size, status.st_mtime_ns) == (source.st_size, source.st_mtime_ns)
    )


def _check_space(folder: Path, size: int) -> None:
    needed_bytes = size + size // 100 + _MARGIN_BYTES
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        raise NotStagedError(
            f"{folder} has {format_bytes(free_bytes)} free of {format_bytes(needed_bytes)} needed"
        )


def _copy(
    source: Path, partial: Path, size: int, progress: Callable[[int, int], None] | None
) -> tuple[int, int]:
    """Bytes and CRC-32 of what was read from the source. Only this user may read the copy."""
    done_bytes, crc = 0, 0
    buffer = memoryview(bytearray(_BLOCK_BYTES))
    fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "wb", buffering=0) as copy, source.open("rb", buffering=0) as original:
        # One byte too many is enough to see that the source grows.
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
    """Bytes and CRC-32 of what the disk holds."""
    done_bytes, crc = 0, 0
    buffer = memoryview(bytearray(_BLOCK_BYTES))
    with partial.open("rb", buffering=0) as copy:
        # Otherwise the cache answers, which proves nothing about the disk.
        os.posix_fadvise(copy.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while count := copy.readinto(buffer):
            crc = zlib.crc32(buffer[:count], crc)
            done_bytes += count
    return done_bytes, crc
