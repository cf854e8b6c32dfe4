"""Files that are not complete yet: a hidden name beside the target, and nothing left of it afterwards."""

from __future__ import annotations

import hashlib
import os
import re
import signal
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ddp_hpc.errors import DdpHpcError

# Writers write all the time: one that has been silent for so long is no more.
_ABANDONED_S = 3600.0
# A name ends at 255 bytes. The rest of a hidden one has at most 143: a host's name has 64.
_MAX_NAME_BYTES = 110
_EXITING = 0x4  # PF_EXITING of Linux's sched.h, in the flags of /proc/PID/stat


@contextmanager
def partial_file(target: Path, writer: str) -> Iterator[Path]:
    """A hidden name beside `target` for one process, to be renamed in the block; gone after it otherwise.

    `writer` is a word that tells one kind of writer from another. The name has not been there before and
    cannot be guessed; open it with `x` where others may write to the folder.
    """
    own = f"{os.getpid()}.{process_started(os.getpid())}.x{os.urandom(4).hex()}"
    partial = target.with_name(f".{_shortened(target.name)}.{writer}-{process_home()}-{own}.partial")
    try:
        yield partial
    finally:
        # What went wrong in the block is the better error.
        with suppress(OSError):
            partial.unlink()


def begins_with(path: Path, *beginnings: bytes) -> bool:
    """Whether the file begins with one of them: what is to be overwritten should be of its kind.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        return file.read(max(map(len, beginnings))).startswith(beginnings)


def write_whole(path: Path, content: bytes, writer: str, *, is_private: bool = False) -> None:
    """Lets `path`, whose folder is made if need be, hold `content`: the old file is seen, or the new one.

    With `is_private` nobody else may write it, whatever the umask. What an earlier writer of this kind left
    in the folder when it was killed is removed.

    Raises:
        DdpHpcError: it cannot be written.
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
    """Removes what killed writers of this kind left in `folder`; what cannot be removed stays.

    Of this host the files whose process is gone, or is ending after SIGKILL; of other
    hosts those that nobody has written to for an hour.
    """
    pattern = re.compile(
        # Earlier versions wrote the process id alone. torch compresses what ends in .json.gz.
        rf"\..+\.{re.escape(writer)}-(?P<home>.+)-(?P<pid>\d+)(?:\.(?P<started>\d*)\.x[0-9a-f]{{8}})?"
        r"\.partial(?:\.json\.gz)?",
        re.DOTALL,
    )
    # Another user's folder may not be listed.
    with suppress(OSError):
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


def process_started(pid: int) -> str:
    """When the process started, which tells it from a later one with its id; empty where it is gone.

    A process that SIGKILL has hit is gone: it writes nothing any more, though its id may stay for
    a while, until its memory is freed and its parent has waited for it.
    """
    fields = process_stat(pid)
    if not fields or _is_killed(pid):
        return ""
    return fields[19]


def process_stat(pid: int, thread: str = "") -> list[str]:
    """The fields of /proc/PID/stat from the state on (proc(5)); empty where it cannot be read.

    With `thread` those of this one of its threads.
    """
    try:
        path = Path(f"/proc/{pid}/task/{thread}/stat" if thread else f"/proc/{pid}/stat")
        return path.read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _is_killed(pid: int) -> bool:
    """Whether the process has ended, or is ending and executes no line of its program any more."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        threads = [process_stat(pid, entry.name) for entry in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return True
    pending = [int(mask, 16) for mask in re.findall(r"^S(?:ig|hd)Pnd:\s*(\S+)$", status, re.MULTILINE)]
    if any(mask >> (signal.SIGKILL - 1) & 1 for mask in pending):
        return True
    return all(not fields or fields[0] in "ZX" or int(fields[6]) & _EXITING for fields in threads)


def is_gone(pid: int, started: str | None) -> bool:
    """Whether the process of this host with that id, which started at that time, has ended.

    `started` is what `process_started` gave for it; with None any process with that id counts.
    """
    if now := process_started(pid):
        return started is not None and started != now
    return not _may_be_anothers(pid)


def _is_abandoned(entry: Path, name: re.Match[str]) -> bool:
    if name["home"] == process_home():
        return is_gone(int(name["pid"]), name["started"])
    return _clock_s(entry.parent) - entry.stat().st_mtime > _ABANDONED_S


def _may_be_anothers(pid: int) -> bool:
    """Whether there is such a process, of another user: /proc may be mounted so that it is not shown."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (ProcessLookupError, OverflowError):
        return False
    # Without /proc nothing else can be told of a process of this user.
    return not Path("/proc/self/stat").exists()


def _clock_s(folder: Path) -> float:
    """Now, by the clock that dates the files in `folder`: it may be another host's, and be wrong."""
    with tempfile.TemporaryFile(dir=folder, buffering=0) as fresh:
        fresh.write(b"x")
        return os.fstat(fresh.fileno()).st_mtime
