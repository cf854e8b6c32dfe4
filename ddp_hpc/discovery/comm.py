"""What ranks say to each other before torch: the `Comm` protocol, and MPI behind it.

The only module that imports mpi4py, and only inside functions: importing
`mpi4py.MPI` calls MPI_Init, which on a login node or under the wrong launcher
can end the process.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import select
import sys
import time
import warnings
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ddp_hpc.errors import LaunchError, RendezvousError

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")

_POLL_S = 0.002
# Hydra's proxy answers within a millisecond.
_SIGN_OFF_S = 2.0


class Comm(Protocol):
    """A group of ranks that can pass small Python objects. All methods are collective."""

    @property
    def rank(self) -> int:
        """This rank's number, from 0."""

    @property
    def size(self) -> int:
        """How many ranks there are."""

    def bcast(self, value: T) -> T:
        """Rank 0's value, everywhere. Collective: every rank must call this."""

    def allgather(self, value: T) -> list[T]:
        """Every rank's value, by rank, everywhere. Collective: every rank must call this."""

    def barrier(self, what: str) -> None:
        """Returns once all ranks have come; `what` names it in errors.

        Collective: every rank must call this.
        """


class SingleComm:
    """The group of one."""

    rank = 0
    size = 1

    def bcast(self, value: T) -> T:
        """The value itself."""
        return value

    def allgather(self, value: T) -> list[T]:
        """The value, alone in a list."""
        return [value]

    def barrier(self, what: str) -> None:
        """Nothing to wait for."""


class MpiComm:
    """MPI_COMM_WORLD as a `Comm`, and what only MPI can tell: which ranks share a node."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()

    def bcast(self, value: T) -> T:
        """Rank 0's value. Collective: every rank must call this."""
        return self._comm.bcast(value, root=0)  # type: ignore[no-any-return]  # mpi4py types objects as Any

    def allgather(self, value: T) -> list[T]:
        """Every rank's value. Collective: every rank must call this."""
        return self._comm.allgather(value)

    def barrier(self, what: str) -> None:  # noqa: ARG002 - an MPI barrier has no name
        """Collective: every rank must call this."""
        self._comm.Barrier()

    def wait_for_all(self, what: str, timeout_s: float) -> None:
        """Returns once all ranks have come. Collective: every rank must call this.

        It sleeps in between, so that signals are heard and the core is free for others:
        MPI's own waits keep it busy and never end.

        Raises:
            RendezvousError: they have not within `timeout_s`; `what` says what was waited for.
        """
        request, end = self._comm.Ibarrier(), time.monotonic() + timeout_s
        while not request.Test():
            if time.monotonic() > end:
                raise RendezvousError(
                    f"rank {self.rank} waited {timeout_s:g} s for {what}; look for their errors, "
                    "or raise the time limit"
                )
            time.sleep(_POLL_S)

    def node_layout(self) -> tuple[int, int, int, int]:
        """Local rank, local size, node rank and number of nodes. Collective: every rank must call this.

        `Split_type(COMM_TYPE_SHARED)` groups the ranks that can share memory,
        which is right also where two hosts have one name.
        """
        from mpi4py import MPI

        node = self._comm.Split_type(MPI.COMM_TYPE_SHARED, key=self.rank)
        local_rank, local_size = node.Get_rank(), node.Get_size()
        leader = node.bcast(self.rank, root=0)
        node.Free()
        leaders = sorted(set(self._comm.allgather(leader)))
        return local_rank, local_size, leaders.index(leader), len(leaders)


def abort_mpi(exit_code: int, patience_s: float) -> None:
    """Ends every rank of MPI_COMM_WORLD, this one too, where MPI was initialised; returns where it was not.

    Without it the others hang in MPI_Finalize when one has failed. `patience_s`
    lets the rank that knows why speak first.
    """
    module = sys.modules.get("mpi4py.MPI")
    if module is None or not module.Is_initialized() or module.Is_finalized():
        return
    if module.COMM_WORLD.Get_size() > 1:  # a singleton has nobody to end
        time.sleep(patience_s)
        module.COMM_WORLD.Abort(exit_code)


def finalize_mpi(*, then_exits: bool = False) -> None:
    """Ends MPI before the process ends, where it was initialised. Collective: every rank must call this.

    A rank in MPI_Finalize waits for the others, and MPICH keeps a core busy while it does.
    `then_exits` says that `os._exit` follows.
    """
    module = sys.modules.get("mpi4py.MPI")
    if module is None or not module.Is_initialized() or module.Is_finalized():
        return
    manager = _process_manager() if then_exits else None
    module.Finalize()
    if manager is not None:
        _sign_off(*manager)


def _process_manager() -> tuple[int, os.stat_result] | None:
    """The socket to MPICH's process manager where it speaks PMI-1, as Hydra does."""
    fd = os.environ.get("PMI_FD", "")
    if not fd.isdigit() or os.environ.get("PMI_VERSION", "1") != "1":
        return None
    with contextlib.suppress(OSError):
        return int(fd), os.fstat(int(fd))
    return None


def _sign_off(fd: int, socket: os.stat_result) -> None:
    """Tells the process manager that this process ends on purpose.

    MPICH 4.1 and later do so in a handler that `os._exit` skips (`MPIR_pmi_finalize_on_exit`). Hydra then
    takes the first rank to end for one that crashed: it kills the others, and returns 9 or 0 instead of
    their exit code. Earlier versions close the socket in MPI_Finalize, and its number may be another file's.
    """
    with contextlib.suppress(OSError):
        if os.path.samestat(os.fstat(fd), socket):
            os.write(fd, b"cmd=finalize\n")
            if select.select([fd], [], [], _SIGN_OFF_S)[0]:
                os.read(fd, 1024)


def mpi4py_is_installed() -> bool:
    """True where `import mpi4py` would work. Imports nothing."""
    return importlib.util.find_spec("mpi4py") is not None


def load_mpi(launcher_family: str, launcher_title: str) -> MpiComm | None:
    """MPI_COMM_WORLD, after MPI_Init. Collective: every rank must call this.

    `launcher_family` is `mpich`, `openmpi` or `any`; with ` or none` behind it a
    library of another family is left alone, and None is what the caller gets.

    The library is asked its name before MPI_Init (which the standard allows):
    MPICH's MPI_Init under Open MPI's mpiexec aborts the process with a text
    about PMI versions that helps nobody.

    Raises:
        LaunchError: mpi4py or its MPI library is missing, or is another MPI than the launcher's.
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
        # "cannot load MPI library" is a RuntimeError.
        raise LaunchError(
            f"mpi4py cannot be used under {launcher_title} ({_first_line(error)}): load the site's MPI "
            "module, or `pip install mpich` for an MPI of its own, or choose a launcher that needs no MPI "
            "with --discovery"
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
            # mpi4py's guess about mixed MPIs, once a rank: `discover` finds out and says it once.
            warnings.simplefilter("ignore", RuntimeWarning)
            MPI.Init_thread(MPI.THREAD_MULTIPLE)
    return MpiComm(MPI.COMM_WORLD)


def wrong_library(launcher_title: str) -> str:
    """The message's middle part: which MPI mpi4py loaded, and the two ways to make them one."""
    return (
        f"mpi4py is bound to {mpi_library()}, which {launcher_title} does not start; "
        f"use the mpiexec of that library{_own_mpiexec()}, or let mpi4py load the launcher's own: "
        "export MPI4PY_LIBMPI=/path/to/its/libmpi.so"
    )


def _own_mpiexec() -> str:
    from pathlib import Path

    path = Path(sys.prefix) / "bin" / "mpiexec"
    return f" ({path})" if path.exists() else ""


def mpi_library() -> str:
    """`MPICH 5.0.2 (/path/to/libmpi.so.12)`: the library that mpi4py loaded."""
    from mpi4py import MPI

    words = _first_line(MPI.Get_library_version()).replace("Version:", " ").replace(",", " ").split()
    path = _loaded_libmpi()
    return " ".join(words[:3]) + (f" ({path})" if path else "")


def _loaded_libmpi() -> str:
    """Which libmpi this process has mapped; empty where that cannot be told."""
    try:
        with open("/proc/self/maps", encoding="utf-8") as maps:  # noqa: PTH123 - a kernel file, no path logic
            for line in maps:
                path = line.split()[-1]
                if "/libmpi" in path and ".so" in path:
                    return path
    except OSError:
        pass
    return ""


def _first_line(value: Any) -> str:
    return str(value).strip().partition("\n")[0]
