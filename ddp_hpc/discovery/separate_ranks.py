"""Notices that the ranks of a program do not work together, by watching the program of rank 0."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ddp_hpc.discovery.listening_ports import listens, listens_elsewhere
from ddp_hpc.discovery.mpi_of_process import mpi_that_is_alone


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
            self._mpi = self._mpi or mpi_that_is_alone(pid, self._environ)
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
            f"the {self._world_size} ranks is an MPI world of its own"
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
