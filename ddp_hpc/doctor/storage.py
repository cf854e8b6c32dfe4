"""Checks of the directories that a job writes to: free space, sockets, file locks and timestamps."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

from ddp_hpc.base.pip_extras import install_command
from ddp_hpc.base.units import format_bytes
from ddp_hpc.doctor.check_result import DoctorFinding, Here, fail, first_line, ok, warn

_WORK_LEAST_BYTES, _WORK_GOOD_BYTES = 1024**3, 10 * 1024**3
_TEMP_LEAST_BYTES, _TEMP_GOOD_BYTES = 100 * 1024**2, 2 * 1024**3
# An example of the sockets that Python's multiprocessing creates in TMPDIR for DataLoader workers.
_SOCKET = "pymp-12345678/listener-12345678"
_SOCKET_PATH_LIMIT = 107  # sun_path in <sys/un.h> has 108 bytes, including the terminator
_CLOCK_LIMIT_S = 2.0
_WRITTEN_S = 1767225600.0  # 2026-01-01, before which this code did not exist


def work_space(here: Here) -> DoctorFinding:
    """Checks the free space in the working directory for snapshots, traces and logs. Ignores quotas."""
    remedy = "start in a directory with more free space"
    return space_in(here.directory, _WORK_LEAST_BYTES, _WORK_GOOD_BYTES, remedy)


def temp_space(here: Here) -> DoctorFinding:
    """Checks the free space in TMPDIR for compiler caches and staged data."""
    remedy = "export TMPDIR=/tmp, or a directory on a local disk"
    return space_in(temp_directory(here), _TEMP_LEAST_BYTES, _TEMP_GOOD_BYTES, remedy)


def temp_directory(here: Here) -> Path:
    """Returns TMPDIR, or /tmp if it is not set."""
    return Path(here.environ.get("TMPDIR") or "/tmp")  # noqa: S108 - the usual default


def space_in(directory: Path, least_bytes: int, good_bytes: int, remedy: str) -> DoctorFinding:
    """Checks whether a directory is writable and has enough free space."""
    try:
        with tempfile.TemporaryFile(dir=directory) as probe:
            probe.write(b"x" * 4096)
            probe.flush()
            os.fsync(probe.fileno())
        space = os.statvfs(directory)
    except OSError as error:
        return fail(f"cannot write to {directory.absolute()} ({error.strerror})", remedy)
    free, path = space.f_bavail * space.f_frsize, str(directory.absolute())
    what = f"{format_bytes(free)} free in {path}"
    if space.f_files and space.f_favail < 1000:
        return fail(f"only {space.f_favail} free inodes in {path}", remedy, path)
    if free < least_bytes:
        return fail(f"{what}, {format_bytes(least_bytes)} are needed", remedy, path)
    if free < good_bytes:
        return warn(f"{what}, {format_bytes(good_bytes)} are recommended", remedy, path)
    return ok(what, path)


def temp_sockets(here: Here) -> DoctorFinding:
    """Checks that DataLoader workers can create sockets in TMPDIR; paths are limited to 107 bytes."""
    directory, remedy = temp_directory(here), "export TMPDIR=/tmp in the job script"
    num_bytes = len(os.fsencode(directory / _SOCKET))
    what = f"the path of a worker's socket in {directory} has {num_bytes} bytes (limit {_SOCKET_PATH_LIMIT})"
    if num_bytes > _SOCKET_PATH_LIMIT:
        return fail(what, remedy)
    try:
        with (
            tempfile.TemporaryDirectory(prefix="pymp-", dir=directory) as created,
            socket.socket(socket.AF_UNIX) as probe,
        ):
            probe.bind(str(Path(created) / "listener-12345678"))
    except OSError as error:
        return fail(f"cannot create a socket in {directory} ({error.strerror})", remedy)
    return ok(what)


def hdf5_locking(here: Here) -> DoctorFinding:
    """Checks HDF5's file lock with a real file in the working directory; some file systems reject it."""
    if find_spec("h5py") is None:
        return warn("not run: h5py is not installed", install_command("train"))
    setting = here.environ.get("HDF5_USE_FILE_LOCKING", "")
    # h5py would use this variable instead of the argument `locking`.
    os.environ.pop("HDF5_USE_FILE_LOCKING", None)
    import h5py

    try:
        with tempfile.TemporaryDirectory(prefix=".ddp-hpc-doctor-", dir=here.directory) as created:
            path = Path(created) / "lock.h5"
            with h5py.File(path, "w", locking=True) as file:
                file["x"] = [1.0]
            with h5py.File(path, "r", locking=True) as file:
                error = "" if file["x"][0] == 1.0 else "the value read differs from the value written"
    except OSError as rejected:
        error = first_line(rejected)
    return lock_finding(error, setting, str(here.directory.absolute()))


def lock_finding(error: str, setting: str, directory: str) -> DoctorFinding:
    """Returns the finding for HDF5's `error` after locking a file; it is empty if the lock worked."""
    if not error:
        return ok(f"HDF5 can lock files in {directory}")
    if "lock" not in error:
        return fail(f"HDF5 cannot write and read a file in {directory} ({error})", "use another file system")
    if setting.upper() in ("FALSE", "0", "BEST_EFFORT"):
        return ok(
            f"{directory} does not support HDF5's lock, and HDF5_USE_FILE_LOCKING={setting} disables it"
        )
    return warn(
        f"{directory} does not support HDF5's lock ({error})",
        "export HDF5_USE_FILE_LOCKING=FALSE if each file has a single writer (ddp-hpc reads without a lock)",
    )


def clock(here: Here) -> DoctorFinding:
    """Compares this host's clock with the timestamps of files in the working directory."""
    with tempfile.TemporaryFile(dir=here.directory, buffering=0) as file:
        before_s = time.time()
        file.write(b"x")
        os.fsync(file.fileno())
        modified_s, after_s = os.fstat(file.fileno()).st_mtime, time.time()
    return clock_finding(before_s, modified_s, after_s)


def clock_finding(before_s: float, modified_s: float, after_s: float) -> DoctorFinding:
    """Returns the finding for the timestamp of a file that was written between the other two times."""
    remedy = "report it to the site: NTP does not work on this host"
    if before_s < _WRITTEN_S:
        return fail(f"this host's date is {time.strftime('%Y-%m-%d', time.gmtime(before_s))}", remedy, "")
    off_s = max(before_s - modified_s, modified_s - after_s)
    if off_s > _CLOCK_LIMIT_S:
        return warn(f"the file system's clock and this host's differ by {off_s:.1f} s", remedy, "")
    return ok("this host's clock and the file system's agree", "")
