"""Checks of the limits that the shell, the scheduler or a container sets for this process."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

from ddp_hpc.base.units import format_bytes
from ddp_hpc.doctor.check_result import Here, Result, fail, ok, warn

_FEW_FILES = 4096
# Greater than Docker's default of 64 MiB, which is a common cause of failures.
_SHM_LEAST_BYTES = 128 * 1024**2
_SHM_GOOD_BYTES = 1024**3
_RDMA = ("/dev/infiniband", "/dev/cxi0", "/dev/hfi1_0")


def open_files(_here: Here) -> Result:
    """Checks the soft limit of open files: workers, sockets and data files of a rank can need thousands."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= _FEW_FILES:
        return ok("unlimited" if soft == resource.RLIM_INFINITY else str(soft))
    what = f"the limit is {soft} open files, at least {_FEW_FILES} are recommended"
    if hard == resource.RLIM_INFINITY or hard > soft:
        higher = _FEW_FILES if hard == resource.RLIM_INFINITY else min(hard, 65536)
        return warn(what, f"ulimit -n {higher} in the job script")
    return warn(what, "ask the site to raise the hard limit of open files (nofile)")


def locked_memory(_here: Here) -> Result:
    """Checks the limit of locked memory, which RDMA fabrics need."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return ok("unlimited")
    size = format_bytes(soft)
    fabric = next((device for device in _RDMA if Path(device).exists()), None)
    if fabric is None:
        return ok(f"{size}; no RDMA device that would need more")
    remedy = "ask the site to raise the limit of locked memory (memlock)"
    if hard == resource.RLIM_INFINITY:
        remedy = "ulimit -l unlimited in the job script"
    return warn(f"limited to {size}, but NCCL and MPI lock the memory that they send over {fabric}", remedy)


def shared_memory(_here: Here) -> Result:
    """Checks the space in /dev/shm, which workers, NCCL and MPI use to exchange data within a node."""
    return shared_memory_in(Path("/dev/shm"))  # noqa: S108 - the directory itself is checked


def shared_memory_in(directory: Path) -> Result:
    """Checks the space in the given directory as in /dev/shm."""
    try:
        space = os.statvfs(directory)
    except OSError as error:
        return fail(f"{directory}: {error.strerror}", "start the container with /dev/shm (--ipc=host)")
    free, total = space.f_bavail * space.f_frsize, space.f_blocks * space.f_frsize
    what = f"{format_bytes(free)} of {format_bytes(total)} free in {directory}"
    remedy = f"remove leftovers in {directory}, or start the container with --shm-size=8g or --ipc=host"
    if not os.access(directory, os.W_OK):
        return fail(f"{directory} is not writable", f"chmod 1777 {directory}, or ask the site")
    if free < _SHM_LEAST_BYTES:
        return fail(what, remedy)
    return warn(what, remedy) if free < _SHM_GOOD_BYTES else ok(what)


def python(_here: Here) -> Result:
    """Reports the Python version, and warns if ~/.local contains packages that hide the environment's."""
    version = ".".join(map(str, sys.version_info[:3]))
    what = f"{version} ({sys.executable})"
    from_user = [name for name in ("torch", "numpy", "mpi4py", "h5py") if (_user_site() / name).is_dir()]
    if from_user:
        return warn(
            f"{what}, with {', '.join(from_user)} from {_user_site()}, not from the environment",
            "export PYTHONNOUSERSITE=1, or install the packages into the environment",
        )
    return ok(what)


def _user_site() -> Path:
    import site

    return Path(site.getusersitepackages() if site.ENABLE_USER_SITE else "/nonexistent")
