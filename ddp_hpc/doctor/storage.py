"""Folders that a job writes to: room, sockets, locks, and the clock that dates files."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

from ddp_hpc.doctor.result import Finding, Here, fail, first_line, ok, warn
from ddp_hpc.units import format_bytes

_WORK_LEAST_BYTES, _WORK_GOOD_BYTES = 1024**3, 10 * 1024**3
_TEMP_LEAST_BYTES, _TEMP_GOOD_BYTES = 100 * 1024**2, 2 * 1024**3
# A listening socket of Python's multiprocessing, as DataLoader workers make it in TMPDIR.
_SOCKET = "pymp-12345678/listener-12345678"
_SOCKET_PATH_LIMIT = 107  # sun_path of <sys/un.h> is 108 with its end
_CLOCK_LIMIT_S = 2.0
_WRITTEN_S = 1767225600.0  # 2026-01-01: no host runs this code before it was written


def work_space(here: Here) -> Finding:
    """Room in the working folder for snapshots, traces and logs. Quotas are the site's own and not seen."""
    return room_in(here.folder, _WORK_LEAST_BYTES, _WORK_GOOD_BYTES, "start in a folder with room")


def temp_space(here: Here) -> Finding:
    """Room in TMPDIR for the caches of compilers and for staged data."""
    return room_in(
        temp_folder(here), _TEMP_LEAST_BYTES, _TEMP_GOOD_BYTES, "export TMPDIR=/tmp, or a local disk's folder"
    )


def temp_folder(here: Here) -> Path:
    """TMPDIR or, as everywhere, /tmp."""
    return Path(here.environ.get("TMPDIR") or "/tmp")  # noqa: S108 - what programs fall back to


def room_in(folder: Path, least_bytes: int, good_bytes: int, remedy: str) -> Finding:
    """Whether a file can be written in a folder, and how much."""
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"x" * 4096)
            probe.flush()
            os.fsync(probe.fileno())
        room = os.statvfs(folder)
    except OSError as error:
        return fail(f"{folder.absolute()} cannot be written ({error.strerror})", remedy)
    free = room.f_bavail * room.f_frsize
    what = f"{format_bytes(free)} free in {folder.absolute()}"
    same = str(folder.absolute())
    if room.f_files and room.f_favail < 1000:
        return fail(f"room for {room.f_favail} more files in {folder.absolute()}", remedy, same)
    if free < least_bytes:
        return fail(f"{what}, {format_bytes(least_bytes)} are needed", remedy, same)
    return (
        warn(f"{what}, {format_bytes(good_bytes)} are good", remedy, same)
        if free < good_bytes
        else ok(what, same)
    )


def temp_sockets(here: Here) -> Finding:
    """Whether the sockets of DataLoader workers fit into TMPDIR: their paths end at 107 bytes."""
    folder, remedy = temp_folder(here), "export TMPDIR=/tmp in the job script"
    num_bytes = len(os.fsencode(folder / _SOCKET))
    if num_bytes > _SOCKET_PATH_LIMIT:
        return fail(
            f"a worker's socket in {folder} has a path of {num_bytes} bytes, of at most {_SOCKET_PATH_LIMIT}",
            remedy,
        )
    try:
        with (
            tempfile.TemporaryDirectory(prefix="pymp-", dir=folder) as made,
            socket.socket(socket.AF_UNIX) as probe,
        ):
            probe.bind(str(Path(made) / "listener-12345678"))
    except OSError as error:
        return fail(f"no socket can be made in {folder} ({error.strerror})", remedy)
    return ok(f"{num_bytes} of {_SOCKET_PATH_LIMIT} bytes for a worker's socket in {folder}")


def hdf5_locking(here: Here) -> Finding:
    """HDF5's file lock, tried with a real file in the working folder: some file systems refuse it."""
    if find_spec("h5py") is None:
        return warn("not tried: h5py is not installed", "pip install 'ddp-hpc[train]'")
    setting = here.environ.get("HDF5_USE_FILE_LOCKING", "")
    os.environ.pop("HDF5_USE_FILE_LOCKING", None)  # it would be stronger than what is tried here
    import h5py

    try:
        with tempfile.TemporaryDirectory(prefix=".ddp-hpc-doctor-", dir=here.folder) as made:
            path = Path(made) / "lock.h5"
            with h5py.File(path, "w", locking=True) as file:
                file["x"] = [1.0]
            with h5py.File(path, "r", locking=True) as file:
                error = "" if file["x"][0] == 1.0 else "what was written was not read"
    except OSError as refused:
        error = first_line(refused)
    return lock_finding(error, setting, str(here.folder.absolute()))


def lock_finding(error: str, setting: str, folder: str) -> Finding:
    """What HDF5's `error` on a locked file means; empty where the lock worked."""
    if not error:
        return ok(f"HDF5 locks files in {folder}")
    if "lock" not in error:
        return fail(f"HDF5 cannot write and read a file in {folder} ({error})", "use another file system")
    if setting.upper() in ("FALSE", "0", "BEST_EFFORT"):
        return ok(f"{folder} refuses HDF5's lock, and HDF5_USE_FILE_LOCKING={setting} does without")
    return warn(
        f"{folder} refuses HDF5's lock ({error})",
        "export HDF5_USE_FILE_LOCKING=FALSE, with one writer a file (ddp-hpc reads without a lock)",
    )


def clock(here: Here) -> Finding:
    """This host's clock against the one that dates files in the working folder."""
    with tempfile.TemporaryFile(dir=here.folder, buffering=0) as fresh:
        before_s = time.time()
        fresh.write(b"x")
        os.fsync(fresh.fileno())
        dated_s, after_s = os.fstat(fresh.fileno()).st_mtime, time.time()
    return clock_finding(before_s, dated_s, after_s)


def clock_finding(before_s: float, dated_s: float, after_s: float) -> Finding:
    """What a file dated `dated_s` and written between the two other times says."""
    remedy = "tell the site: its time service (NTP) does not keep the clock here"
    if before_s < _WRITTEN_S:
        return fail(
            f"this host believes it is {time.strftime('%Y-%m-%d', time.gmtime(before_s))}", remedy, ""
        )
    off_s = max(before_s - dated_s, dated_s - after_s)
    if off_s > _CLOCK_LIMIT_S:
        return warn(f"the file system's clock and this host's differ by {off_s:.1f} s", remedy, "")
    return ok("this host's clock and the file system's agree", "")
