"""The secret of one launch (the job's key), without which a process cannot connect to the ranks' store.

With MPI, rank 0 broadcasts a new key. Without MPI the key is in a file that only the user can read:
`DDP_HPC_KEY_FILE`, or a file that the first rank creates in a directory that all nodes share.
The key is never passed as an argument or in an environment variable.
"""

from __future__ import annotations

import hashlib
import os
import stat
import time
from contextlib import suppress
from pathlib import Path

from ddp_hpc.base.errors import LaunchError
from ddp_hpc.base.private_directory import make_private
from ddp_hpc.discovery.launcher_environment import Environ
from ddp_hpc.rendezvous.store_protocol import KEY_BYTES

KEY_FILE = "DDP_HPC_KEY_FILE"
_KEY_DIR = "DDP_HPC_KEY_DIR"
_TEXT_BYTES = 2 * KEY_BYTES
# Another rank usually writes its key to an empty file soon, but that rank may have been killed.
_WRITING_S = 10.0
_OLD_S = 24 * 3600.0


def new_secret() -> bytes:
    """Returns a new random key."""
    return os.urandom(KEY_BYTES)


def read_secret(path: Path) -> bytes:
    """Returns the key in a file.

    Raises:
        LaunchError: the file does not exist, contains no key, or other users can read or write it.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise LaunchError(f"{path}: the job's key cannot be read") from error
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise LaunchError(
                f"{path}: the file with the job's key must belong to the user who runs the job and have mode "
                f"0600, but it has mode {stat.S_IMODE(status.st_mode):04o} and belongs to user "
                f"{status.st_uid}; remove it"
            )
        text = file.read(_TEXT_BYTES + 2).strip()
    if len(text) == _TEXT_BYTES:
        with suppress(ValueError):
            return bytes.fromhex(text.decode("ascii", "replace"))
    raise LaunchError(f"{path}: does not contain a key of {_TEXT_BYTES} hexadecimal digits; remove the file")


def write_secret(path: Path, key: bytes) -> None:
    """Creates a file of mode 0600 that contains the key.

    Raises:
        OSError: the file already exists, or cannot be created.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(key.hex().encode() + b"\n")
        file.flush()
        os.fsync(descriptor)


def shared_secret(environ: Environ, launch: str) -> tuple[bytes, str]:
    """Returns the key of ranks that do not use MPI, and a note for the user if the key is not secret.

    `launch` identifies this launch and is the same on all ranks. Every rank tries to create the file, and
    reads it if another rank was faster. Thus no rank depends on another rank, or on a directory listing
    that its node has cached.

    Raises:
        LaunchError: the file that the user specified cannot be used.
    """
    if named := environ.get(KEY_FILE):
        return read_secret(Path(named)), ""
    problems = []
    for directory in _key_directories(environ):
        try:
            return _key_in(directory, hashlib.sha256(launch.encode()).hexdigest()[:32]), ""
        except LaunchError as error:
            problems.append(str(error))
        except OSError as error:
            problems.append(f"{directory}: {error.strerror}")
    return hashlib.sha256(b"no secret: " + launch.encode()).digest(), (
        f"this job has no secret key ({'; '.join(problems)}), so other users of its nodes could connect; "
        f"set {_KEY_DIR} to a directory that only you can write to and that all nodes share"
    )


def _key_directories(environ: Environ) -> list[Path]:
    """Returns the directories to try in order, the same on all ranks."""
    if named := environ.get(_KEY_DIR):
        return [Path(named)]
    state = environ.get("XDG_STATE_HOME") or f"{environ.get('HOME', '/nonexistent')}/.local/state"
    run = environ.get("DDP_HPC_RUN_DIR")
    return [*([Path(run) / f".keys-{os.geteuid()}"] if run else []), Path(state) / "ddp-hpc" / "keys"]


def _key_in(directory: Path, name: str) -> bytes:
    if not make_private(directory):
        raise LaunchError(f"{directory}: belongs to another user, or others can write to it")
    path, key = directory / f"{name}.key", new_secret()
    try:
        write_secret(path, key)
    except FileExistsError:
        return _read_written(path)
    _remove_old(directory)
    return key


def _read_written(path: Path) -> bytes:
    """Returns the key in a file that another rank may still be writing.

    Raises:
        LaunchError: the file contains no key after some seconds.
    """
    end_s = time.monotonic() + _WRITING_S
    while True:
        try:
            return read_secret(path)
        except LaunchError:
            if time.monotonic() > end_s:
                raise
        time.sleep(0.05)


def _remove_old(directory: Path) -> None:
    now_s = time.time()
    for path in directory.glob("*.key"):
        with suppress(OSError):
            if now_s - path.stat().st_mtime > _OLD_S:
                path.unlink()
