"""The checks by name, and how they are run: at once, each in a child with a time limit of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from ddp_hpc.doctor import allreduce, gpus, limits, mpi, network, storage
from ddp_hpc.doctor.child import Gone, collect, start, stop
from ddp_hpc.doctor.result import Check, Here, Result
from ddp_hpc.errors import RequestError, nearest

CHECKS = (
    Check("python", "the interpreter, and packages that hide an environment's", limits.python),
    Check("launch", "whether the launcher's variables tell a rank", network.launch),
    Check("scheduler", "the commands of Slurm or PBS", network.scheduler),
    Check("cores", "cores that this process may use", limits.cores),
    Check("threads", "OMP_NUM_THREADS against the cores", limits.threads),
    Check("torch", "torch, and its build against the driver", gpus.torch_build, 60.0),
    Check("gpus", "GPUs, their memory errors and compute mode", gpus.gpu_state, 40.0),
    Check("nccl", "NCCL and its network plugin", gpus.nccl, 60.0),
    Check("mpi4py", "the MPI library of mpi4py, started alone", mpi.mpi4py_binding, 60.0),
    Check("mpi-launcher", "mpiexec against mpi4py's library", mpi.mpi_launcher, 80.0),
    Check("fabric", "network interfaces that lead to other nodes", network.fabric),
    Check("hostname", "what the host's own name resolves to", network.own_name, 30.0),
    Check("open-files", "the limit of open files", limits.open_files),
    Check("locked-memory", "the limit of locked memory", limits.locked_memory),
    Check("shm", "room in /dev/shm", limits.shared_memory),
    Check("work-space", "room in the working folder", storage.work_space),
    Check("tmp-space", "room in TMPDIR", storage.temp_space),
    Check("tmp-sockets", "whether sockets can be made in TMPDIR", storage.temp_sockets),
    Check("hdf5-locking", "HDF5's file lock in the working folder", storage.hdf5_locking, 30.0),
    Check("clock", "this host's clock against the file system's", storage.clock),
    Check("allreduce", "two ranks that add numbers over loopback", allreduce.two_ranks, 75.0),
)


def chosen(only: Sequence[str], skip: Sequence[str], checks: Sequence[Check] = CHECKS) -> list[Check]:
    """The checks that were asked for, in their own order.

    Raises:
        RequestError: a name is no check's, or none is left.
    """
    names = [check.name for check in checks]
    for option, given in (("--only", only), ("--skip", skip)):
        for name in given:
            if name not in names:
                raise RequestError(
                    f"{option} {name}: no such check{nearest(name, names)}; ddp-hpc doctor --list names them"
                )
    left = [check for check in checks if (not only or check.name in only) and check.name not in skip]
    if not left:
        raise RequestError("--only and --skip leave no check; leave one of them out")
    return left


def run_checks(checks: Sequence[Check], here: Here) -> Iterator[Result]:
    """What each check says, in order. All run at once; what is hung is given up after its time."""
    waiting = [start(partial(check.run, here), check.limit_s) for check in checks]
    try:
        for check in checks:
            # Out of the list at once: the id of a child that was waited for may soon be somebody else's.
            found = collect(waiting.pop(0))
            if isinstance(found, Gone):
                remedy = f"the others are not held up by it; --skip {check.name} leaves it out"
                yield Result(check.name, "fail", f"given up: {found.why}", remedy, "fail given up")
            else:
                yield Result(check.name, found.status, found.what, found.remedy, found.compared_by)
    finally:
        stop(waiting)
