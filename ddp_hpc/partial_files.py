"""Files that are not complete yet: a hidden name beside the target, and nothing left of it afterwards."""

from __future__ import annotations

import hashlib
import os
import re
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ddp_hpc.errors import DdpHpcError

# Writers write all the time: one that has been silent for so long is no more.
_ABANDONED_S = 3600.0
# A name ends at 255 bytes. The rest of a hidden one is at most 110: a host's name has 64.
_MAX_NAME_BYTES = 120


@contextmanager
def partial_file(target: Path, writer: str) -> Iterator[Path]:
    """A hidden name beside `target` for one process, to be renamed in the block; gone after it otherwise.

    `writer` is a word that tells one kind of writer from another.
    """
    partial = target.with_name(f".{_shortened(target.name)}.{writer}-{process_home()}-{os.getpid()}.partial")
    try:
        yield partial
    finally:
        # What went wrong in the block is the better error.
        with suppress(OSError):
            partial.unlink()


def write_whole(path: Path, content: bytes, writer: str) -> None:
    """Lets `path`, whose folder is made if need be, hold `content`: the old file is seen, or the new one.

    Raises:
        DdpHpcError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial_file(path, writer) as partial:
            with partial.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
    except OSError as error:
        raise DdpHpcError(f"{path}: cannot be written") from error


def give_name(partial: Path, target: Path, *, replace: bool) -> None:
    """Lets the complete file `partial` be `target`, at once and whole.

    Without `replace` a file that is there is never harmed, whenever it came, save on a
    file system without hard links: there looking and renaming are two steps.

    Raises:
        FileExistsError: without `replace`, something has the name already.
        OSError: the file system refuses.
    """
    if not replace:
        try:
            os.link(partial, target)
        except FileExistsError:
            raise
        except OSError:
            if os.path.lexists(target):
                raise FileExistsError(f"{target} is there already") from None
        else:
            return
    partial.replace(target)


def remove_leftovers(folder: Path, writer: str) -> None:
    """Removes what killed writers left in `folder`; what cannot be removed stays.

    Of this host the files whose process is gone (one process writes one file at a
    time), of other hosts those that nobody has written to for an hour.
    """
    pattern = re.compile(rf"\..+\.{re.escape(writer)}-(?P<home>.+)-(?P<pid>\d+)\.partial", re.DOTALL)
    for entry in folder.iterdir():
        # It may be another user's, or another start tidies up just now.
        with suppress(OSError):
            if (match := pattern.fullmatch(entry.name)) and _is_abandoned(entry, match):
                entry.unlink()


def _shortened(name: str) -> str:
    encoded = os.fsencode(name)
    if len(encoded) <= _MAX_NAME_BYTES:
        return name
    digest = hashlib.sha256(encoded).hexdigest()[:16]
    return encoded[: _MAX_NAME_BYTES - len(digest)].decode("utf-8", "ignore") + digest


def process_home() -> str:
    """Where a process id means one process: the host, and the PID namespace of a container on it."""
    try:
        namespace = Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        namespace = 0
    return f"{socket.gethostname()}-{namespace}"


def _is_abandoned(entry: Path, name: re.Match[str]) -> bool:
    if name["home"] == process_home():
        return not _is_other_process(int(name["pid"]))
    return _clock_s(entry.parent) - entry.stat().st_mtime > _ABANDONED_S


def _clock_s(folder: Path) -> float:
    """Now, by the clock that dates the files in `folder`: it may be another host's, and be wrong."""
    with tempfile.TemporaryFile(dir=folder, buffering=0) as fresh:
        fresh.write(b"x")
        return os.fstat(fresh.fileno()).st_mtime


def _is_other_process(pid: int) -> bool:
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    # A killed rank stays a zombie until its launcher looks after it.
    return process_stat(pid)[:1] not in (["Z"], ["X"])


def process_stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on (proc(5)); none where nobody tells."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
