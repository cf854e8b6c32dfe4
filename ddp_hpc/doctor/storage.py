"""Checks of the free space in the directories that a job writes to."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from ddp_hpc.base.units import format_bytes
from ddp_hpc.doctor.check_result import Here, Result, fail, ok, warn

_WORK_LEAST_BYTES, _WORK_GOOD_BYTES = 1024**3, 10 * 1024**3
_TEMP_LEAST_BYTES, _TEMP_GOOD_BYTES = 100 * 1024**2, 2 * 1024**3


def work_space(_here: Here) -> Result:
    """Checks the free space in the working directory for snapshots, traces and logs. Ignores quotas."""
    remedy = "start in a directory with more free space"
    return space_in(Path(), _WORK_LEAST_BYTES, _WORK_GOOD_BYTES, remedy)


def temp_space(here: Here) -> Result:
    """Checks the free space in TMPDIR for compiler caches and staged data."""
    remedy = "export TMPDIR=/tmp, or a directory on a local disk"
    return space_in(temp_directory(here), _TEMP_LEAST_BYTES, _TEMP_GOOD_BYTES, remedy)


def temp_directory(here: Here) -> Path:
    """Returns TMPDIR, or /tmp if it is not set."""
    return Path(here.environ.get("TMPDIR") or "/tmp")  # noqa: S108 - the usual default


def space_in(directory: Path, least_bytes: int, good_bytes: int, remedy: str) -> Result:
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
        return fail(f"only {space.f_favail} free inodes in {path}", remedy)
    if free < least_bytes:
        return fail(f"{what}, {format_bytes(least_bytes)} are needed", remedy)
    if free < good_bytes:
        return warn(f"{what}, {format_bytes(good_bytes)} are recommended", remedy)
    return ok(what)
