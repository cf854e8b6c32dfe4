"""Limits that the shell, the scheduler or a container puts on this process. Stdlib only."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

from ddp_hpc.doctor.result import Finding, Here, fail, ok, warn
from ddp_hpc.units import format_bytes

_FEW_FILES = 4096
_SHM_LEAST_BYTES = 128 * 1024**2  # Docker's default of 64 MiB is the known trap
_SHM_GOOD_BYTES = 1024**3
_RDMA = ("/dev/infiniband", "/dev/cxi0", "/dev/hfi1_0")


def open_files(_here: Here) -> Finding:
    """The soft limit of open files: a rank with loader workers, sockets and data files needs thousands."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= _FEW_FILES:
        return ok(_count(soft))
    what = f"{soft} open files are allowed, {_FEW_FILES} are good"
    if hard == resource.RLIM_INFINITY or hard > soft:
        more = _FEW_FILES if hard == resource.RLIM_INFINITY else min(hard, 65536)
        return warn(what, f"ulimit -n {more} in the job script")
    return warn(what, "ask the site to raise the hard limit of open files (nofile)")


def locked_memory(_here: Here) -> Finding:
    """The limit of locked memory, which RDMA fabrics count against."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return ok("unlimited")
    size = format_bytes(soft)
    fabric = next((device for device in _RDMA if Path(device).exists()), None)
    if fabric is None:
        return ok(f"{size}; no RDMA device here that would need more")
    raise_it = "ulimit -l unlimited in the job script" if hard == resource.RLIM_INFINITY else "ask the site"
    return warn(f"{size} beside {fabric}: NCCL and MPI lock the memory they send from", raise_it)


def shared_memory(_here: Here) -> Finding:
    """Room in /dev/shm, through which loader workers, NCCL and MPI hand data on within a node."""
    return shared_memory_in(Path("/dev/shm"))  # noqa: S108 - the folder itself is looked at


def shared_memory_in(folder: Path) -> Finding:
    """The same of any folder."""
    try:
        room = os.statvfs(folder)
    except OSError as error:
        return fail(f"{folder}: {error.strerror}", "start the container with /dev/shm (--ipc=host)")
    free, total = room.f_bavail * room.f_frsize, room.f_blocks * room.f_frsize
    what = f"{format_bytes(free)} of {format_bytes(total)} free in {folder}"
    remedy = f"remove leftovers in {folder}, or start the container with --shm-size=8g or --ipc=host"
    same = format_bytes(total)
    if not os.access(folder, os.W_OK):
        return fail(f"{folder} cannot be written", f"chmod 1777 {folder}, or ask the site", same)
    if free < _SHM_LEAST_BYTES:
        return fail(what, remedy, same)
    return warn(what, remedy, same) if free < _SHM_GOOD_BYTES else ok(what, same)


def cores(_here: Here) -> Finding:
    """Cores that this process may use: the launcher's binding and a container's quota."""
    allowed, there = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    what = f"{allowed} of {there} cores"
    if allowed == 1 and there > 1:
        return warn(
            f"{what}: the one-core trap, where all threads and loader workers share a core",
            "ask for cores: srun --cpus-per-task=N, mpiexec --cpu-bind depth -d N, --bind-to none",
        )
    quota = cpu_quota(Path("/sys/fs/cgroup/cpu.max"))
    if quota is not None and quota < allowed:
        return warn(f"{what}, but a cgroup allows the time of {quota:g}", f"use at most {quota:g} threads")
    return ok(what)


def cpu_quota(cpu_max: Path) -> float | None:
    """Cores' worth of time from cgroup v2's `cpu.max`; None where there is no limit."""
    try:
        quota, period = cpu_max.read_text(encoding="ascii").split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None


def threads(here: Here) -> Finding:
    """OMP_NUM_THREADS against the cores: PBS sets it to the chunk's cores, and every rank inherits it."""
    text, allowed = here.environ.get("OMP_NUM_THREADS"), len(os.sched_getaffinity(0))
    if text is None:
        return ok("OMP_NUM_THREADS is not set: training divides the cores among the ranks of a node")
    first = text.split(",")[0].strip()
    if not (first.isascii() and first.isdecimal() and int(first[:9]) > 0):
        return warn(f"OMP_NUM_THREADS={text[:80]!r} is no number of threads", "unset OMP_NUM_THREADS")
    if int(first[:9]) * here.local_size > allowed:
        ranks = f" in each of {here.local_size} ranks" if here.local_size > 1 else ""
        return warn(
            f"OMP_NUM_THREADS={first[:9]}{ranks} on {allowed} cores",
            f"export OMP_NUM_THREADS={max(1, allowed // here.local_size)}",
        )
    return ok(f"OMP_NUM_THREADS={first[:9]} on {allowed} cores")


def python(_here: Here) -> Finding:
    """The interpreter, and packages of the user's own folder that come before an environment's."""
    version = ".".join(map(str, sys.version_info[:3]))
    what = f"{version} ({sys.executable})"
    from_user = [name for name in ("torch", "numpy", "mpi4py", "h5py") if (_user_site() / name).is_dir()]
    if from_user:
        return warn(
            f"{what}, with {', '.join(from_user)} from {_user_site()}, which hides those of a module",
            "export PYTHONNOUSERSITE=1, or install into the environment",
        )
    return ok(what)


def _user_site() -> Path:
    import site

    return Path(site.getusersitepackages() if site.ENABLE_USER_SITE else "/nonexistent")


def _count(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else str(limit)
