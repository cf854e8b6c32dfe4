"""Finds out whether the MPI library of a running program can know the other ranks.

An MPI program that was started without a process manager that its library understands becomes a world of one
rank, without a message. This happens with `srun --mpi=none`, under torchrun, and if the library and mpiexec
belong to different MPIs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

# The ABI of MPICH, Intel MPI, MVAPICH and Cray MPICH has the version 12, that of Open MPI 40 or 80.
_MPICH = re.compile(r"/(libmpi(?:ch|_\w+)?\.so\.12)\b")
_OPEN_MPI = re.compile(r"/(libmpi\.so\.[48]0)\b")
_PMIX = re.compile(r"/libpmix\.so")
# How process managers present themselves: PMI-1 and PMI-2, PALS, MVAPICH's mpirun_rsh.
_OF_PMI = ("PMI_", "PALS_", "MPIRUN_", "MV2_")
_OF_OPEN_MPI = ("PMIX_", "OMPI_COMM_WORLD_")


def mpi_that_is_alone(pid: int, environ: Mapping[str, str]) -> str:
    """Returns the name of the MPI that a process uses if this MPI cannot know the other ranks; else empty.

    `environ` is the environment with which the process was started.
    """
    with suppress(OSError):
        return _alone(Path(f"/proc/{pid}/maps").read_text(errors="replace"), environ)
    return ""


def _alone(maps: str, environ: Mapping[str, str]) -> str:
    if found := _OPEN_MPI.search(maps):
        return "" if _has(environ, _OF_OPEN_MPI) else f"Open MPI ({found[1]})"
    if found := _MPICH.search(maps):
        # MPICH can be built for PMIx, and then loads its library.
        managers = (*_OF_PMI, "PMIX_") if _PMIX.search(maps) else _OF_PMI
        return "" if _has(environ, managers) else f"MPICH or a relative of it ({found[1]})"
    return ""


def _has(environ: Mapping[str, str], prefixes: Iterable[str]) -> bool:
    return any(name.startswith(tuple(prefixes)) for name in environ)
