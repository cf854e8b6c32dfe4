"""The ranks of `python -m data_gen` under a launcher. Without a launcher, mpi4py is not imported."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from ddp_hpc.base.errors import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    DdpHpcError,
    LaunchError,
    ReportedElsewhereError,
)
from ddp_hpc.discovery.launcher_environment import Environ, peek_rank, present_launchers, read_launcher_values
from ddp_hpc.discovery.print_once_per_node import print_once_per_node
from ddp_hpc.discovery.rank_communication import Comm, MpiComm, SingleComm, abort_mpi, finalize_mpi
from ddp_hpc.discovery.watchdog import time_limit
from ddp_hpc.discovery.world import discover, short_hostname

T = TypeVar("T")
A = TypeVar("A")


class LimitedComm:
    """MPI ranks with a time limit on every wait for other ranks."""

    def __init__(self, comm: MpiComm, timeout_s: float) -> None:
        self._comm, self._timeout_s = comm, timeout_s
        self.rank, self.size = comm.rank, comm.size

    def bcast(self, value: T) -> T:
        """Returns rank 0's value. Collective: every rank must call this."""
        self.barrier("rank 0")
        return self._comm.bcast(value)

    def allgather(self, value: T) -> list[T]:
        """Returns the values of all ranks in order. Collective: every rank must call this."""
        self.barrier("the other ranks to write their parts of the file (--timeout)")
        return self._comm.allgather(value)

    def combine(self, value: T, rule: Callable[[list[T]], A]) -> A:
        """Returns the answer of rank 0's `rule`. Collective: every rank must call this."""
        self.barrier("the other ranks (--timeout)")
        return self._comm.combine(value, rule)

    def barrier(self, what: str) -> None:
        """Waits for all ranks; error messages quote `what`. Collective: every rank must call this."""
        self._comm.wait_for_all(what, self._timeout_s)


@contextmanager
def connected_ranks(timeout_s: float) -> Iterator[Comm]:
    """Connects all ranks of this launch; a rank waits for other ranks for at most `timeout_s` at a time.

    Collective if several ranks were started. If an error occurs on this rank only, the other ranks are
    terminated too.

    Raises:
        RendezvousError: the other ranks did not arrive in time.
        ReportedElsewhereError: the launch itself failed, and the reason has been printed.
    """
    comm = _join(os.environ, timeout_s)
    try:
        yield comm
    except BaseException as error:
        if comm.size > 1 and not (isinstance(error, DdpHpcError) and error.on_all_ranks):
            # MPI_Finalize would deadlock, because the other ranks wait for this one.
            code, text = _verdict(error)
            os.write(2, f"[rank {comm.rank}/{comm.size} {short_hostname()}] {text}\n".encode())
            abort_mpi(code, patience_s=0.0)
        raise
    finally:
        finalize_mpi()


def _verdict(error: BaseException) -> tuple[int, str]:
    if isinstance(error, DdpHpcError):
        return error.exit_code, f"error: {error}"
    if isinstance(error, KeyboardInterrupt):
        return EXIT_INTERRUPTED, "interrupted: nothing was written"
    return EXIT_FAILED, traceback.format_exc().rstrip()


def _join(environ: Environ, timeout_s: float) -> Comm:
    launchers = present_launchers(environ)
    if not launchers:
        return SingleComm()
    prefix = f"[rank {peek_rank(environ)} {short_hostname()}] "
    try:
        # A single rank needs no MPI. If the launcher does not provide the world size, there may be several
        # ranks.
        if read_launcher_values(launchers[0], environ).world_size == 1:
            return SingleComm()
        with time_limit(timeout_s, prefix) as watchdog:
            watchdog.stage("in MPI_Init for the other ranks: one of them did not start, or has ended")
            world = discover(environ)
        if world.world_size > 1 and world.mpi is None:
            raise LaunchError(
                f"{world.launcher} started {world.world_size} ranks, but writing one file together requires "
                "MPI. Start them with mpiexec and install mpi4py, or start one process."
            )
    except LaunchError as error:
        print_once_per_node(f"error: {error}", environ)
        abort_mpi(error.exit_code, patience_s=0.0)
        raise ReportedElsewhereError(str(error), error.cause) from None
    return SingleComm() if world.mpi is None else LimitedComm(world.mpi, timeout_s)
