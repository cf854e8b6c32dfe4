"""Writes files atomically: to a hidden partial file next to the target, which is then renamed or removed."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ddp_hpc.base.errors import DdpHpcError
from ddp_hpc.base.process_status import is_gone, process_started

# Writers write continuously, so a file that has not changed for this many seconds is abandoned.
_ABANDONED_S = 3600.0
# Maximum length of the target's name in the name of a partial file. File names have at most 255 bytes, and
# the rest of the name takes at most 143, of which the host name takes up to 64.
_MAX_NAME_BYTES = 110


@contextmanager
def partial_file(target: Path, writer: str) -> Iterator[Path]:
    """Yields a hidden path next to `target`, for a file or a directory that the block creates.

    If the block does not rename it, it is removed afterwards.

    `writer` is a word that identifies the kind of writer. The file name is new and cannot be guessed. Open
    the file with mode `x` if other users can write to the directory.
    """
    own = f"{os.getpid()}.{process_started(os.getpid())}.x{os.urandom(4).hex()}"
    partial = target.with_name(f".{_shortened(target.name)}.{writer}-{process_home()}-{own}.partial")
    try:
        yield partial
    finally:
        # An error in the block is more important than an error during the removal.
        with suppress(OSError):
            _remove(partial)


def begins_with(path: Path, *beginnings: bytes) -> bool:
    """Returns whether the file begins with one of these byte strings, which identify its type.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        return file.read(max(map(len, beginnings))).startswith(beginnings)


def append_line(path: Path, line: bytes) -> None:
    """Appends a line in one write. Other users cannot write the file, regardless of the umask.

    Raises:
        DdpHpcError: the file cannot be written.
    """
    line += b"\n"
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            # The supervisor refuses files that others can write, and a default ACL overrides the umask.
            os.fchmod(handle, os.fstat(handle).st_mode & 0o755)
            size = os.fstat(handle).st_size
            # If the last line is incomplete, begin a new line before this one.
            if size and os.pread(handle, 1, size - 1) != b"\n":
                line = b"\n" + line
            written = os.write(handle, line)
        finally:
            os.close(handle)
    except OSError as error:
        raise DdpHpcError(f"{path} cannot be written") from error
    if written < len(line):
        raise DdpHpcError(f"{path}: only {written} of {len(line)} bytes could be written; check the quota")


def write_atomically(path: Path, content: bytes, writer: str, *, is_private: bool = False) -> None:
    """Writes `content` to `path` atomically: readers see either the old file or the new one.

    A missing directory is created. With `is_private`, other users cannot write the file, regardless of the
    umask. Partial files of killed writers of this kind are removed from the directory.

    Raises:
        DdpHpcError: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(path.parent, writer)
        with partial_file(path, writer) as partial:
            with partial.open("xb") as file:
                if is_private:
                    os.fchmod(file.fileno(), os.fstat(file.fileno()).st_mode & 0o755)
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
    except OSError as error:
        raise DdpHpcError(f"{path}: cannot be written") from error


def move_into_place(partial: Path, target: Path, *, replace: bool) -> None:
    """Renames the complete file `partial` to `target` atomically.

    Without `replace` an existing file is never overwritten, even if another process creates it at the
    same moment. On a file system without hard links, however, the check and the renaming are two steps.

    Raises:
        FileExistsError: without `replace`, `target` exists.
        OSError: the file system reports an error.
    """
    if not replace:
        try:
            os.link(partial, target)
        except FileExistsError:
            raise
        except OSError:
            if os.path.lexists(target):
                raise FileExistsError(f"{target} already exists") from None
        else:
            return
    partial.replace(target)


def sync_to_disk(path: Path) -> None:
    """Waits until a file, or the list of entries of a directory, is on disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def remove_leftovers(directory: Path, writer: str) -> None:
    """Removes partial files of killed writers of this kind from `directory`; errors are ignored.

    Files of this host are removed if their process has ended or is ending after SIGKILL, and files of
    other hosts if they have not changed for an hour.
    """
    pattern = re.compile(
        # torch compresses files that end in .json.gz.
        rf"\..+\.{re.escape(writer)}-(?P<home>.+)-(?P<pid>\d+)\.(?P<started>\d*)\.x[0-9a-f]{{8}}"
        r"\.partial(?:\.json\.gz)?",
        re.DOTALL,
    )
    # The directory of another user may not be readable.
    with suppress(OSError):
        for entry in directory.iterdir():
            # The file may belong to another user, or another process may be removing it at the same time.
            with suppress(OSError):
                if (match := pattern.fullmatch(entry.name)) and _is_abandoned(entry, match):
                    _remove(entry)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _shortened(name: str) -> str:
    encoded = os.fsencode(name)
    if len(encoded) <= _MAX_NAME_BYTES:
        return name
    digest = hashlib.sha256(encoded).hexdigest()[:16]
    return encoded[: _MAX_NAME_BYTES - len(digest)].decode("utf-8", "ignore") + digest


def process_home() -> str:
    """Returns the scope in which a process id is unique: the host and the PID namespace of a container."""
    try:
        namespace = Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        namespace = 0
    return f"{os.uname().nodename}-{namespace}"


def _is_abandoned(entry: Path, name: re.Match[str]) -> bool:
    if name["home"] == process_home():
        return is_gone(int(name["pid"]), name["started"])
    return _clock_s(entry.parent) - entry.stat().st_mtime > _ABANDONED_S


def _clock_s(directory: Path) -> float:
    """Returns the time of the clock that sets the file times in `directory`, such as a file server's."""
    with tempfile.TemporaryFile(dir=directory, buffering=0) as fresh:
        fresh.write(b"x")
        return os.fstat(fresh.fileno()).st_mtime
