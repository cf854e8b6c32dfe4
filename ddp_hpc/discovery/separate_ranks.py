"""Notices that the ranks of a program do not work together, by watching the program of rank 0.

An MPI program that was started without a process manager that its library understands becomes a world of one
rank, without a message. This happens with `srun --mpi=none`, under torchrun, and if the library and mpiexec
belong to different MPIs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from ddp_hpc.discovery.listening_ports import listens, listens_elsewhere

# The ABI of MPICH, Intel MPI, MVAPICH and Cray MPICH has the version 12, that of Open MPI 40 or 80.
_MPICH = re.compile(r"/(libmpi(?:ch|_\w+)?\.so\.12)\b")
_OPEN_MPI = re.compile(r"/(libmpi\.so\.[48]0)\b")
_PMIX = re.compile(r"/libpmix\.so")
# How process managers present themselves: PMI-1 and PMI-2, PALS, MVAPICH's mpirun_rsh.
_OF_PMI = ("PMI_", "PALS_", "MPIRUN_", "MV2_")
_OF_OPEN_MPI = ("PMIX_", "OMPI_COMM_WORLD_")


class SeparateRanks:
    """Watches the program of rank 0, which was started as one of `world_size` ranks.

    Args:
        world_size: the number of ranks.
        port: MASTER_PORT, on which torch's store listens once the program has opened a process group.
        inherited: sockets that the program has inherited, as of `sockets_of`.
        environ: the environment of the program.
    """

    def __init__(self, world_size: int, port: int, inherited: set[str], environ: Mapping[str, str]) -> None:
        self._world_size, self._port, self._inherited, self._environ = world_size, port, inherited, environ
        self._has_other_port = False
        self._mpi = ""
        self.have_met = False
        """Whether the program has opened a process group."""

    def look(self, pid: int) -> None:
        """Looks at the program, which runs as process `pid`."""
        self.have_met = self.have_met or listens(self._port, Path(f"/proc/{pid}/net"))
        if not self.have_met:
            self._mpi = self._mpi or _mpi_that_is_alone(pid, self._environ)
            self._has_other_port = self._has_other_port or listens_elsewhere(pid, self._inherited)

    @property
    def is_settled(self) -> bool:
        """Returns whether nothing more has to be known. An MPI that is alone also listens on ports."""
        return self.have_met or (self._has_other_port and not self._mpi)

    @property
    def mpi(self) -> str:
        """Returns why the ranks are separate worlds of MPI; empty if that is not known."""
        if self.have_met or not self._mpi:
            return ""
        return (
            f"uses {self._mpi}, which was started without a process manager that it understands, so each of "
            f"the {self._world_size} ranks has its own MPI_COMM_WORLD"
        )

    @property
    def warning(self) -> str:
        """Returns a warning for the log, with what to do; empty if nothing is wrong as far as is known."""
        if self.is_settled:
            return ""
        if self._mpi:
            return (
                f"{self._world_size} ranks were started, but rank 0's program {self.mpi}; start it with the "
                "mpiexec of this MPI, or with an --mpi option of srun that fits (see srun --mpi=list)"
            )
        return (
            f"{self._world_size} ranks were started, but rank 0's program has not opened a process group, so "
            "each rank may be training alone on the same data; call "
            "torch.distributed.init_process_group() in the program (RANK, WORLD_SIZE and MASTER_ADDR are "
            "set), or use --env-style none if the program needs no process group"
        )


def _mpi_that_is_alone(pid: int, environ: Mapping[str, str]) -> str:
    """Returns the name of the MPI that a process uses if this MPI cannot know the other ranks; else empty.

    `environ` is the environment with which the process was started.
    """
    with suppress(OSError):
        return _alone(Path(f"/proc/{pid}/maps").read_text(errors="replace"), environ)
    return ""


def _alone(maps: str, environ: Mapping[str, str]) -> str:
    if library := _OPEN_MPI.search(maps):
        return "" if _has(environ, _OF_OPEN_MPI) else f"Open MPI ({library[1]})"
    if library := _MPICH.search(maps):
        # MPICH can be built for PMIx, and then loads its library.
        managers = (*_OF_PMI, "PMIX_") if _PMIX.search(maps) else _OF_PMI
        return "" if _has(environ, managers) else f"MPICH or a relative of it ({library[1]})"
    return ""


def _has(environ: Mapping[str, str], prefixes: Iterable[str]) -> bool:
    return any(name.startswith(tuple(prefixes)) for name in environ)
