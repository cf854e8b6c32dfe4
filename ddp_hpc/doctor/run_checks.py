"""The list of checks, and a function that runs them concurrently in child processes with time limits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from ddp_hpc.base.errors import RequestError, nearest
from ddp_hpc.doctor import gpus, limits, mpi, network, storage
from ddp_hpc.doctor.check_result import Check, Here, Result
from ddp_hpc.doctor.run_in_child import NoAnswer, collect, start, stop

CHECKS = (
    Check("python", "the Python version, and packages in the user's site directory", limits.python),
    Check("torch", "whether the driver supports torch's build", gpus.torch_build, 60.0),
    Check("gpus", "memory errors and compute mode of the GPUs", gpus.gpu_state, 40.0),
    Check("nccl", "NCCL and its network plugin", gpus.nccl, 60.0),
    Check("mpi", "whether mpi4py has an MPI library, and mpiexec belongs to it", mpi.mpi, 60.0),
    Check("fabric", "network interfaces that lead to other nodes", network.interfaces),
    Check("open-files", "the limit of open files", limits.open_files),
    Check("locked-memory", "the limit of locked memory", limits.locked_memory),
    Check("shm", "free space in /dev/shm", limits.shared_memory),
    Check("work-space", "free space in the working directory", storage.work_space),
    Check("tmp-space", "free space in TMPDIR", storage.temp_space),
)


def chosen(only: Sequence[str], skip: Sequence[str]) -> list[Check]:
    """Returns the selected checks in their usual order.

    Raises:
        RequestError: there is no check of that name, or no check is left.
    """
    names = [check.name for check in CHECKS]
    for option, given in (("--only", only), ("--skip", skip)):
        for name in given:
            if name not in names:
                raise RequestError(
                    f"{option} {name}: no such check{nearest(name, names)}; see ddp-hpc doctor --list"
                )
    left = [check for check in CHECKS if (not only or check.name in only) and check.name not in skip]
    if not left:
        raise RequestError("--only and --skip together exclude all checks; omit one of these options")
    return left


def run_checks(checks: Sequence[Check], here: Here) -> Iterator[Result]:
    """Yields the results of the checks in order. They run concurrently, each with its time limit."""
    waiting = [start(partial(check.run, here), check.limit_s) for check in checks]
    try:
        for check in checks:
            # Remove the child from the list first: once it has been reaped, another process may get its ID.
            finding = collect(waiting.pop(0))
            if isinstance(finding, NoAnswer):
                remedy = f"other checks are not affected; use --skip {check.name} to omit this one"
                yield Result(check.name, "fail", f"aborted: {finding.reason}", remedy)
            else:
                yield replace(finding, name=check.name)
    finally:
        stop(waiting)
