"""The key that only the ranks of one launch share, so that nobody else can take part in it.

Where ranks have MPI, rank 0 sends a fresh one. Elsewhere it is in a file that only their user can
read: `DDP_HPC_KEY_FILE`, or one that the first rank to come makes in a directory that all nodes see.
It is never in an argument or in a variable's value.
"""

from __future__ import annotations

import hashlib
import os
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ddp_hpc.discovery.launcher_environment import Environ
from ddp_hpc.errors import LaunchError
from ddp_hpc.private_directory import make_private
from ddp_hpc.rendezvous.store_protocol import KEY_BYTES

KEY_FILE = "DDP_HPC_KEY_FILE"
_KEY_DIR = "DDP_HPC_KEY_DIR"
_TEXT_BYTES = 2 * KEY_BYTES
# A file that is there and empty is being written, unless its writer was killed just then.
_WRITING_S = 10.0
_OLD_S = 24 * 3600.0


def new_key() -> bytes:
    """A key that nobody has."""
    return os.urandom(KEY_BYTES)


def read_key(path: Path) -> bytes:
    """The key in a file.

    Raises:
        LaunchError: it is not there, holds no key, or others may read or write it.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise LaunchError(f"{path}: the job's key cannot be read") from error
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise LaunchError(
                f"{path}: the job's key has to belong to the user who runs the job, with mode 0600; it has "
                f"mode {stat.S_IMODE(found.st_mode):04o} and belongs to user {found.st_uid}; remove the file"
            )
        text = file.read(_TEXT_BYTES + 2).strip()
    if len(text) == _TEXT_BYTES:
        with suppress(ValueError):
            return bytes.fromhex(text.decode("ascii", "replace"))
    raise LaunchError(f"{path}: holds no key of {_TEXT_BYTES} hexadecimal digits; remove the file")


def write_key(path: Path, key: bytes) -> None:
    """Makes a file of mode 0600 with a key in it.

    Raises:
        OSError: it is there already, or cannot be made.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(key.hex().encode() + b"\n")
        file.flush()
        os.fsync(descriptor)


def shared_key(environ: Environ, launch: str) -> tuple[bytes, str]:
    """The key of the ranks that cannot send messages yet, and a note for people where it is no secret.

    `launch` names this launch alone, the same on all ranks. Each rank makes the file, or finds that
    another one has: so none waits for another, nor for a directory listing that its node has cached.

    Raises:
        LaunchError: the file that the user named cannot be used.
    """
    if named := environ.get(KEY_FILE):
        return read_key(Path(named)), ""
    problems = []
    for directory in _key_directories(environ):
        try:
            return _key_in(directory, hashlib.sha256(launch.encode()).hexdigest()[:32]), ""
        except (OSError, LaunchError) as error:
            problems.append(
                str(error) if isinstance(error, LaunchError) else f"{directory}: {error.strerror}"
            )
    return hashlib.sha256(b"no secret: " + launch.encode()).digest(), (
        f"this job has no secret key ({'; '.join(problems)}), so other users of its nodes could disturb it; "
        f"name a directory that only you can write and that all nodes see in {_KEY_DIR}"
    )


def _key_directories(environ: Environ) -> list[Path]:
    """Those to be tried in turn, the same on all ranks."""
    if named := environ.get(_KEY_DIR):
        return [Path(named)]
    state = environ.get("XDG_STATE_HOME") or f"{environ.get('HOME', '/nonexistent')}/.local/state"
    run = environ.get("DDP_HPC_RUN_DIR")
    return [*([Path(run) / f".keys-{os.geteuid()}"] if run else []), Path(state) / "ddp-hpc" / "keys"]


def _key_in(directory: Path, name: str) -> bytes:
    if not make_private(directory):
        raise LaunchError(f"{directory}: is somebody else's, or others may write it")
    path, key = directory / f"{name}.key", new_key()
    try:
        write_key(path, key)
    except FileExistsError:
        return _read_written(path)
    _remove_old(directory)
    return key


def _read_written(path: Path) -> bytes:
    """The key in a file that another rank may still be writing.

    Raises:
        LaunchError: it holds none after some seconds.
    """
    end_s = time.monotonic() + _WRITING_S
    while True:
        try:
            return read_key(path)
        except LaunchError:
            if time.monotonic() > end_s:
                raise
        time.sleep(0.05)


def _remove_old(directory: Path) -> None:
    for path in _old_files(directory):
        with suppress(OSError):
            path.unlink()


def _old_files(directory: Path) -> Iterator[Path]:
    now_s = time.time()
    for path in directory.glob("*.key"):
        with suppress(OSError):
            if now_s - path.stat().st_mtime > _OLD_S:
                yield path
