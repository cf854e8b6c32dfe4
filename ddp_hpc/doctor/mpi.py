"""Check of the MPI library that mpi4py is bound to, and of mpiexec."""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec

from ddp_hpc.base.pip_extras import install_command
from ddp_hpc.discovery.local_mpi import ask_version, first_mpiexec, is_open_mpi
from ddp_hpc.discovery.rank_communication import mpi_library
from ddp_hpc.doctor.check_result import Here, Result, fail, first_line, ok, warn

_VERSION_LIMIT_S = 10.0
_NO_MPI = f"{install_command('mpich')}, or load the site's MPI and pip install mpi4py"


def mpi(here: Here) -> Result:
    """Checks whether mpi4py loads an MPI library, and whether the first mpiexec on the PATH belongs to it."""
    if find_spec("mpi4py") is None:
        return warn("mpi4py is not installed, so ranks of some MPI launchers cannot be detected", _NO_MPI)
    import mpi4py

    mpi4py.rc.initialize = False
    mpi4py.rc.finalize = False
    try:
        from mpi4py import MPI
    # mpi4py raises RuntimeError if it cannot load the MPI library.
    except (ImportError, RuntimeError) as error:
        return fail(f"mpi4py cannot be used ({first_line(error)})", _NO_MPI)
    path = here.environ.get("PATH", os.defpath)
    mpiexec = first_mpiexec(path)
    if mpiexec is None:
        what = f"mpi4py is bound to {mpi_library()}, no mpiexec on the PATH"
        return ok(what) if shutil.which("srun", path=path) else warn(f"{what}, nor srun", _NO_MPI)
    launcher = family_of(ask_version(str(mpiexec), _VERSION_LIMIT_S)[1])
    bound = family_of(MPI.Get_library_version())
    what = f"{mpiexec} is {launcher or 'of unknown type'}, mpi4py is bound to {mpi_library()}"
    # Cray's launchers do not report to which MPI they belong. They start ranks of MPICH.
    if launcher and bound and launcher != bound:
        remedy = "put the mpiexec of that MPI first on the PATH, or export MPI4PY_LIBMPI=/path/to/libmpi.so"
        return fail(what, remedy)
    return ok(what)


def family_of(version: str) -> str:
    """Returns the MPI that printed a version text: `Open MPI`, `MPICH` (or a derivative), or nothing.

    >>> family_of("mpiexec (Open MPI) 5.0.11")
    'Open MPI'
    """
    if is_open_mpi(version):
        return "Open MPI"
    text = version.upper()
    return "MPICH" if any(name in text for name in ("HYDRA", "MPICH", "INTEL(R) MPI", "MVAPICH")) else ""
