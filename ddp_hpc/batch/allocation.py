"""What this shell has to start ranks on: the nodes, CPUs and GPUs of an allocation, or this machine alone.

Read from the scheduler's variables, which every shell of a job has; no command of the scheduler is asked.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ddp_hpc.errors import RequestError

# A shell in which one of these is more than 1 is one of several that a launcher started.
_SIZES = ("SLURM_STEP_NUM_TASKS", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "PALS_LOCAL_SIZE", "MPI_LOCALNRANKS")
# Only ranks have these; of one rank a node PALS tells no size,.
_RANKS_ALONE = ("PALS_RANKID", "TORCHELASTIC_RUN_ID")
_ASK_LIMIT_S = 10.0
# Of a node without GPUs: cores for one rank, and how many ranks it has at least, so that they are several.
_CORES_PER_RANK, _LEAST_RANKS = 8, 2


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """One job's nodes, or this machine (`scheduler` is `local`). 0 where a number is not told.

    Where nodes differ, each number is the smallest one.
    """

    scheduler: str
    job_id: str = ""
    num_nodes: int = 1
    tasks_per_node: int = 0
    """Ranks that the job's own options named."""
    cpus_per_node: int = 0
    gpus_per_node: int = 0

    def __str__(self) -> str:
        """`2 nodes of slurm job 17`, or `this machine`."""
        if self.scheduler == "local":
            return "this machine"
        return f"{self.num_nodes} node{'s' * (self.num_nodes > 1)} of {self.scheduler} job {self.job_id}"


THIS_MACHINE = Allocation(scheduler="local")


def find_allocation(environ: Mapping[str, str]) -> Allocation:
    """The allocation that this shell belongs to, or `THIS_MACHINE`.

    Raises:
        RequestError: this process is one of several ranks, or the scheduler's variables cannot be read.
    """
    for name in _RANKS_ALONE:
        if name in environ:
            raise RequestError(
                f"{name}={environ[name][:40]}: a launcher has started this process, and each one it starts "
                "would start all ranks again; call ddp-hpc launch once, without a launcher in front"
            )
    for name in _SIZES:
        if _first_number(environ.get(name, "")) > 1:
            raise RequestError(
                f"{name}={environ[name][:20]}: this is one of several ranks already, and each would start "
                "all ranks again; call ddp-hpc launch once, without srun or mpiexec in front"
            )
    if "SLURM_JOB_ID" in environ:
        return _slurm(environ)
    if "PBS_NODEFILE" in environ:
        return _pbs(environ)
    return THIS_MACHINE


def _slurm(environ: Mapping[str, str]) -> Allocation:
    text = environ.get("SLURM_JOB_NUM_NODES") or environ.get("SLURM_NNODES", "")
    if not _first_number(text):
        raise RequestError(
            f"SLURM_JOB_ID is set, but SLURM_JOB_NUM_NODES is {text[:40]!r}; the number of nodes is needed; "
            "call ddp-hpc launch in the shell of sbatch or salloc, or unset SLURM_JOB_ID"
        )
    # SLURM_TASKS_PER_NODE is there in any job, and is the number of CPUs where nobody named tasks.
    named = "SLURM_NTASKS" in environ
    return Allocation(
        scheduler="slurm",
        job_id=environ["SLURM_JOB_ID"],
        num_nodes=_first_number(text),
        tasks_per_node=_least(environ.get("SLURM_TASKS_PER_NODE", "")) if named else 0,
        cpus_per_node=_least(environ.get("SLURM_JOB_CPUS_PER_NODE", "")),
        # `4`, or `a100:4` as it was asked for; salloc's shell has only the second variable.
        gpus_per_node=_first_number(environ.get("SLURM_GPUS_ON_NODE", ""))
        or _first_number(environ.get("SLURM_GPUS_PER_NODE", "").rpartition(":")[2]),
    )


def _pbs(environ: Mapping[str, str]) -> Allocation:
    path = Path(environ["PBS_NODEFILE"])
    try:
        lines = path.read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(
            f"PBS_NODEFILE={path} cannot be read ({error}); call ddp-hpc launch on the job's first node, "
            "in its script or in the shell of qsub -I"
        ) from None
    if not lines:
        raise RequestError(f"PBS_NODEFILE={path} names no node; start the job anew")
    # A node's name is repeated for each of its mpiprocs.
    repeats = Counter(lines)
    return Allocation(
        scheduler="pbs",
        job_id=environ.get("PBS_JOBID", "?"),
        num_nodes=len(repeats),
        tasks_per_node=min(repeats.values()) if len(lines) > len(repeats) else 0,
    )


def gpus_here(environ: Mapping[str, str]) -> int:
    """GPUs of this node that are not hidden: CUDA_VISIBLE_DEVICES, else what nvidia-smi lists. No torch."""
    if (visible := environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        devices = visible.split(",") if visible else []
        # CUDA leaves out what follows a -1.
        return devices.index("-1") if "-1" in devices else len(devices)
    program = shutil.which("nvidia-smi", path=environ.get("PATH", os.defpath))
    if program is None:
        return 0
    try:
        done = subprocess.run(
            [program, "-L"], capture_output=True, timeout=_ASK_LIMIT_S, check=False, env=dict(environ)
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0
    # Without a driver it prints its complaint to stdout.
    return sum(line.startswith(b"GPU ") for line in done.stdout.splitlines())


def cpus_here() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0))


def ranks_for(cores: int) -> int:
    """Ranks for a node without GPUs: one for each 8 cores, two at least where there are two cores."""
    return max(min(cores, _LEAST_RANKS), cores // _CORES_PER_RANK)


def _first_number(text: str) -> int:
    match = re.match(r"[0-9]{1,9}(?![0-9])", text)
    return int(match[0]) if match else 0


def _least(text: str) -> int:
    """The smallest number of Slurm's `2(x3),1`; 0 where it is none."""
    return min((_first_number(part) for part in text.split(",")), default=0)
