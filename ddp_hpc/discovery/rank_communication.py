"""Communication between ranks before torch starts: the `Comm` protocol and its implementation with MPI.

This is the only module that imports mpi4py, and it does so only inside functions: importing `mpi4py.MPI`
calls MPI_Init, which can end the process on a login node or under the wrong launcher.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import select
import stat
import struct
import sys
import termios
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TextIO, TypeVar

from ddp_hpc.base.errors import LaunchError
from ddp_hpc.base.option_names import named
from ddp_hpc.discovery.lost_rank_grace import LostRankGrace

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")
A = TypeVar("A")

_OUTPUT_READ_S = 2.0
_FINALIZE_ANSWER_S = 2.0  # Hydra's proxy usually answers within a millisecond
# Slurm's PMI-1 server, which does not kill the other ranks, does not set this variable.
_OF_HYDRA = "PMI_HOSTNAME"
_lost_rank_grace: list[LostRankGrace] = []


class Comm(Protocol):
    """A group of ranks that exchange small Python objects. All methods are collective."""

    @property
    def rank(self) -> int:
        """This rank's number, from 0."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    def bcast(self, value: T) -> T:
        """Returns rank 0's value on every rank. Collective: every rank must call this."""

    def allgather(self, value: T) -> list[T]:
        """Returns every rank's value, in rank order. Collective: every rank must call this.

        Each of N ranks receives N values, so prefer `combine` where its answer is sufficient.
        """

    def combine(self, value: T, rule: Callable[[list[T]], A]) -> A:
        """Returns the answer that `rule` computes on rank 0 from every rank's value, in rank order.

        Collective: every rank must call this.
        """

    def barrier(self, what: str) -> None:
        """Returns once all ranks have called it; `what` names the barrier in error messages.

        Collective: every rank must call this.
        """


@dataclass(frozen=True)
class Members(Generic[T]):
    """The values of the ranks that belong to one group, for example to one node."""

    values: list[T]
    """The values of the ranks of this group, in rank order."""
    index: int
    """The number of this group, from 0, in the order of the first ranks of all groups."""
    num_groups: int


class GroupComm(Comm, Protocol):
    """A `Comm` whose ranks can also send different answers to different ranks."""

    def gather(self, what: str, value: T) -> list[T]:
        """Returns every rank's value on rank 0, in rank order, and an empty list on the others.

        The other ranks do not wait. `what` names the values in error messages.

        Collective: every rank must call this.
        """

    def members(self, group: str, value: T) -> Members[T]:
        """Returns the values of the ranks that specify the same `group`.

        Collective: every rank must call this.
        """


def first_text(texts: list[str]) -> str:
    """Returns the first text that is not empty, such as the problem of the first affected rank."""
    return next(filter(None, texts), "")


class SingleComm:
    """A group that consists of one rank."""

    rank = 0
    size = 1

    def bcast(self, value: T) -> T:
        """Returns the value unchanged."""
        return value

    def allgather(self, value: T) -> list[T]:
        """Returns a list that contains only this rank's value."""
        return [value]

    def combine(self, value: T, rule: Callable[[list[T]], A]) -> A:
        """Returns the answer for this rank's value."""
        return rule([value])

    def gather(self, what: str, value: T) -> list[T]:  # noqa: ARG002 - there is nothing to wait for
        """Returns a list that contains only this rank's value."""
        return [value]

    def members(self, group: str, value: T) -> Members[T]:  # noqa: ARG002 - there is only one group
        """Returns a group that contains only this rank's value."""
        return Members([value], 0, 1)

    def barrier(self, what: str) -> None:
        """Returns immediately, because there are no other ranks."""


class MpiComm:
    """A `Comm` over MPI_COMM_WORLD, which can also determine which ranks share a node."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()

    def bcast(self, value: T) -> T:
        """Returns rank 0's value. Collective: every rank must call this."""
        return self._comm.bcast(value, root=0)  # type: ignore[no-any-return]  # mpi4py types objects as Any

    def allgather(self, value: T) -> list[T]:
        """Returns every rank's value. Collective: every rank must call this."""
        return self._comm.allgather(value)

    def combine(self, value: T, rule: Callable[[list[T]], A]) -> A:
        """Returns the answer of rank 0's `rule`. Collective: every rank must call this."""
        values = self._comm.gather(value, root=0)
        return self._comm.bcast(None if values is None else rule(values), root=0)  # type: ignore[no-any-return]  # as above

    def barrier(self, what: str) -> None:  # noqa: ARG002 - an MPI barrier has no name
        """Returns once all ranks have called it. Collective: every rank must call this."""
        self._comm.Barrier()

    def node_layout(self) -> tuple[int, int, int, int]:
        """Returns local rank, local size, node rank and number of nodes.

        Collective: every rank must call this.

        `Split_type(COMM_TYPE_SHARED)` groups the ranks that can share memory,
        which is correct even if two hosts have the same name.
        """
        from mpi4py import MPI

        node = self._comm.Split_type(MPI.COMM_TYPE_SHARED, key=self.rank)
        local_rank, local_size = node.Get_rank(), node.Get_size()
        leads = int(local_rank == 0)
        # The number of a node is the number of first ranks of nodes before its own first rank.
        num_before = self._comm.exscan(leads)
        node_rank = node.bcast(num_before or 0, root=0)
        node.Free()
        return local_rank, local_size, node_rank, self._comm.allreduce(leads)


def abort_mpi(exit_code: int, patience_s: float) -> None:
    """Ends every rank of MPI_COMM_WORLD, including this one; returns if MPI is not active.

    Without a call of MPI_Abort, the other ranks hang in MPI_Finalize after one rank has failed. MPI_Abort is
    called after `patience_s` seconds, in which the rank that knows the cause can print it.
    """
    module = _active_mpi()
    if module is not None and module.COMM_WORLD.Get_size() > 1:  # a single rank needs no MPI_Abort
        time.sleep(patience_s)
        wait_until_read(sys.stdout, sys.stderr)
        module.COMM_WORLD.Abort(exit_code)


def wait_until_read(*streams: TextIO) -> None:
    """Waits until the launcher has read what this rank has printed, at most `_OUTPUT_READ_S` seconds.

    At MPI_Abort, Hydra (5.0.2) ends the job without reading what is left in the pipes of the ranks, so that
    the reason was lost in 26 of 450 runs.
    """
    until_s = time.monotonic() + _OUTPUT_READ_S
    for stream in streams:
        with contextlib.suppress(OSError, ValueError):  # closed, or nobody reads it
            stream.flush()
            while stat.S_ISFIFO(os.fstat(stream.fileno()).st_mode) and time.monotonic() < until_s:
                (unread,) = struct.unpack("i", fcntl.ioctl(stream, termios.FIONREAD, bytes(4)))
                if not unread:
                    break
                time.sleep(0.01)


def finalize_mpi(*, then_exits: bool = False) -> None:
    """Finalizes MPI before the process ends, if it is active. Collective: every rank must call this.

    A rank in MPI_Finalize waits for the others, and MPICH keeps a core busy while it waits. Set `then_exits`
    if the caller then ends the process with `os._exit`.
    """
    module = _active_mpi()
    if module is None:
        return
    manager = _process_manager() if then_exits else None
    module.Finalize()
    if manager is not None:
        _report_finalize(*manager)
    for grace in _lost_rank_grace:
        grace.end()


def _active_mpi() -> Any:
    """Returns the module mpi4py.MPI between MPI_Init and MPI_Finalize, and None at other times."""
    module = sys.modules.get("mpi4py.MPI")
    return module if module and module.Is_initialized() and not module.Is_finalized() else None


def _process_manager() -> tuple[int, os.stat_result] | None:
    """Returns the socket to MPICH's process manager and its status, if the manager uses PMI-1 like Hydra."""
    fd = os.environ.get("PMI_FD", "")
    if not fd.isdigit() or os.environ.get("PMI_VERSION", "1") != "1":
        return None
    with contextlib.suppress(OSError):
        return int(fd), os.fstat(int(fd))
    return None


def _report_finalize(fd: int, socket: os.stat_result) -> None:
    """Notifies the process manager that this process exits on purpose.

    MPICH 4.1 and later send this message in an exit handler (`MPIR_pmi_finalize_on_exit`), which `os._exit`
    skips. Without the message, Hydra assumes that the first rank to exit has crashed: it kills the others,
    and returns 9 or 0 instead of their exit code. Earlier versions close the socket in MPI_Finalize, so its
    number may belong to another file now.
    """
    with contextlib.suppress(OSError):
        if os.path.samestat(os.fstat(fd), socket):
            os.write(fd, b"cmd=finalize\n")
            if select.select([fd], [], [], _FINALIZE_ANSWER_S)[0]:
                os.read(fd, 1024)


def mpi4py_is_installed() -> bool:
    """Returns whether the package mpi4py is installed, without importing it."""
    return importlib.util.find_spec("mpi4py") is not None


def load_mpi(launcher_family: str, launcher_title: str) -> MpiComm | None:
    """Initializes MPI and returns MPI_COMM_WORLD. Collective: every rank must call this.

    `launcher_family` is the kind of MPI that the launcher supports: `mpich`, `openmpi` or `any`. With the
    suffix ` or none`, the function returns None instead of initializing an MPI of another kind.

    The library's name is read before MPI_Init, as the MPI standard allows: under Open MPI's mpiexec,
    MPICH's MPI_Init aborts the process with an unhelpful message about PMI versions.

    Raises:
        LaunchError: mpi4py or its MPI library is missing, or belongs to another MPI than the launcher.
    """
    if "mpi4py.MPI" not in sys.modules:
        import mpi4py

        mpi4py.rc.initialize = False
        mpi4py.rc.finalize = True
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        if launcher_family.endswith(" or none"):
            return None
        # mpi4py raises RuntimeError for "cannot load MPI library".
        raise LaunchError(
            f"mpi4py cannot be used under {launcher_title} ({_first_line(error)}): load the site's MPI "
            "module, install an MPI with `pip install mpich`, or choose a launcher that needs no MPI "
            f"with {named('discovery')}"
        ) from None
    family, _, optional = launcher_family.partition(" ")
    own_family = "openmpi" if "Open MPI" in MPI.Get_library_version() else "mpich"
    if not MPI.Is_initialized() and family != own_family:
        if optional:
            return None
        if family == "openmpi":
            raise LaunchError(f"{wrong_library(launcher_title)}; MPI_Init would abort")
    if not MPI.Is_initialized():
        with warnings.catch_warnings():
            # Otherwise mpi4py could warn on every rank about mixed MPIs, which `discover` reports once.
            warnings.simplefilter("ignore", RuntimeWarning)
            MPI.Init_thread(MPI.THREAD_MULTIPLE)
        if (manager := _process_manager()) is not None and _OF_HYDRA in os.environ:
            _lost_rank_grace.append(LostRankGrace(manager[0]))
    return MpiComm(MPI.COMM_WORLD)


def wrong_library(launcher_title: str) -> str:
    """Returns text for an error: the MPI library that mpi4py has loaded, and two ways to fix it."""
    from ddp_hpc.discovery.local_mpi import bundled_mpiexec

    bundled = bundled_mpiexec()
    return (
        f"mpi4py is bound to {mpi_library()}, but {launcher_title} does not start ranks of that library; "
        f"use its mpiexec{f' ({bundled})' if bundled else ''}, or make mpi4py load the launcher's library: "
        "export MPI4PY_LIBMPI=/path/to/its/libmpi.so"
    )


def mpi_library() -> str:
    """Returns the library that mpi4py has loaded, such as `MPICH 5.0.2 (/path/to/libmpi.so.12)`."""
    from mpi4py import MPI

    words = _first_line(MPI.Get_library_version()).replace("Version:", " ").replace(",", " ").split()
    path = _loaded_libmpi()
    return " ".join(words[:3]) + (f" ({path})" if path else "")


def _loaded_libmpi() -> str:
    """Returns the path of the libmpi that this process has loaded; empty if it cannot be determined."""
    with contextlib.suppress(OSError), open("/proc/self/maps", encoding="utf-8") as maps:  # noqa: PTH123 - a kernel file, no path logic
        for line in maps:
            path = line.split()[-1]
            if "/libmpi" in path and ".so" in path:
                return path
    return ""


def _first_line(value: Any) -> str:
    return str(value).strip().partition("\n")[0]
