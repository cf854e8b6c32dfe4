"""Finds the nodes, CPUs and GPUs of the current allocation or of this machine.

Values are read from the scheduler's environment variables; no scheduler command is run.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from ddp_hpc.base.errors import RequestError
from ddp_hpc.schedulers.allocation import THIS_MACHINE, Allocation, first_number
from ddp_hpc.schedulers.registry import SCHEDULERS

# If one of these variables is greater than 1, a launcher has started several processes of this program.
_SIZES = ("SLURM_STEP_NUM_TASKS", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "PALS_LOCAL_SIZE", "MPI_LOCALNRANKS")
# These variables are set only in ranks. PALS_RANKID is needed because PALS sets no size for 1 rank per node.
_RANKS_ALONE = ("PALS_RANKID", "TORCHELASTIC_RUN_ID")
# Cores per rank, and the minimum number of ranks, on a node without GPUs.
_CORES_PER_RANK, _LEAST_RANKS = 8, 2


def find_allocation(environ: Mapping[str, str]) -> Allocation:
    """Returns the allocation that this shell belongs to, or `THIS_MACHINE`.

    Raises:
        RequestError: this process is one of several ranks, or the scheduler's variables cannot be read.
    """
    for name in _RANKS_ALONE:
        if name in environ:
            raise RequestError(
                f"{name}={environ[name][:40]}: a launcher started this process, so each of its processes "
                "would start all ranks. Run ddp-hpc launch once, without another launcher."
            )
    for name in _SIZES:
        if first_number(environ.get(name, "")) > 1:
            raise RequestError(
                f"{name}={environ[name][:20]}: this process is one of several ranks, each of which would "
                "start all ranks. Run ddp-hpc launch once, without srun or mpiexec."
            )
    allocations = (scheduler.inside_job.find_allocation(environ) for scheduler in SCHEDULERS.values())
    return next(filter(None, allocations), THIS_MACHINE)


def cpus_here() -> int:
    """Returns the number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0))


def ranks_for(cores: int) -> int:
    """Returns the number of ranks for a node without GPUs: one per 8 cores, but at least 2 if possible."""
    return max(min(cores, _LEAST_RANKS), cores // _CORES_PER_RANK)
