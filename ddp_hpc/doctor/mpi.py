"""mpi4py, the MPI library it is bound to, and the mpiexec that would start its ranks."""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec
from pathlib import Path

from ddp_hpc import local_mpi
from ddp_hpc.doctor.result import Finding, Here, fail, first_line, ok, warn
from ddp_hpc.world.comm import mpi_library

# What launchers leave in a rank: with it a single MPI process would wait for ranks that never come.
_LAUNCHERS = ("PMI_", "PMIX_", "PALS_", "OMPI_", "PRTE_", "HYDI_", "HYDRA_", "MPI_LOCAL", "MV2_", "SLURM_")
_VERSION_LIMIT_S = 10.0
_TRIAL = "both of two ranks found each other"
_NO_MPI = "pip install 'ddp-hpc[mpich]', or load the site's MPI and pip install mpi4py"


def without_launcher(environ: dict[str, str]) -> dict[str, str]:
    """The environment as it would be under no launcher."""
    return {name: value for name, value in environ.items() if not name.startswith(_LAUNCHERS)}


def mpi4py_binding(here: Here) -> Finding:
    """The MPI library that mpi4py loads, and whether one process alone comes up with it."""
    if find_spec("mpi4py") is None:
        return warn("mpi4py is not installed: ranks of plain MPI launchers cannot be told", _NO_MPI)
    for name in set(os.environ) - set(without_launcher(dict(os.environ))):
        del os.environ[name]
    if problem := _load_mpi():
        return fail(problem, _NO_MPI)
    from mpi4py import MPI

    library = mpi_library()
    pid = os.fork()  # MPI_Init may end the process: this one lives to tell
    if pid == 0:
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
        os._exit(0 if MPI.COMM_WORLD.Get_size() == 1 else 3)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code == 0:
        return ok(library)
    text = f"{library}: one process alone did not get through MPI_Init (exit code {code})"
    if here.in_job:
        return fail(text, "start it with the launcher; if that fails too, bind mpi4py to the site's MPI")
    return warn(text, "usual on login nodes: try again in a job")


def mpi_launcher(here: Here) -> Finding:
    """The first mpiexec on the PATH against mpi4py's library, tried with two ranks outside jobs."""
    found = shutil.which("mpiexec", path=here.environ.get("PATH", os.defpath))
    if found is None:
        if shutil.which("srun", path=here.environ.get("PATH", os.defpath)):
            return ok("no mpiexec on the PATH; srun starts the ranks")
        return warn("neither mpiexec nor srun is on the PATH", _NO_MPI)
    mpiexec = Path(found)
    launcher = family_of(version_of(mpiexec))
    if find_spec("mpi4py") is None:
        return warn(f"{mpiexec} ({launcher or 'of no known kind'}), but mpi4py is not installed", _NO_MPI)
    if problem := _load_mpi():
        return fail(f"{mpiexec}, but {problem}", _NO_MPI)
    from mpi4py import MPI

    bound = family_of(MPI.Get_library_version())
    what = f"{mpiexec} is {launcher or 'of an unknown kind'}, mpi4py is bound to {mpi_library()}"
    remedy = "put the other mpiexec first on the PATH, or export MPI4PY_LIBMPI=/path/to/its/libmpi.so"
    # Cray's launchers name no family and start MPICH's.
    if launcher and bound and launcher != bound:
        return fail(what, remedy)
    if here.is_rank or not launcher or here.in_job:
        return ok(what)
    if local_mpi.works(mpiexec, without_launcher(dict(here.environ))):
        return ok(f"{what}: {_TRIAL}")
    return fail(f"{what}, but two ranks did not find each other", remedy)


def _load_mpi() -> str:
    """Imports mpi4py.MPI without MPI_Init; what is wrong with it, or nothing."""
    import mpi4py

    mpi4py.rc.initialize = False
    mpi4py.rc.finalize = False
    try:
        from mpi4py import MPI  # noqa: F401 - the import is the question
    except (ImportError, RuntimeError) as error:  # "cannot load MPI library" is a RuntimeError
        return f"mpi4py cannot be used ({first_line(error)})"
    return ""


def version_of(mpiexec: Path) -> str:
    """What `mpiexec --version` prints; empty where it gives no answer."""
    return local_mpi.ask_version(str(mpiexec), _VERSION_LIMIT_S)[1]


def family_of(version: str) -> str:
    """`Open MPI` or `MPICH` (Intel's and Cray's are MPICH's kind) by a version text; empty for neither.

    >>> family_of("mpiexec (Open MPI) 5.0.11")
    'Open MPI'
    """
    if local_mpi.is_open_mpi(version):
        return "Open MPI"
    words = version.upper()
    return "MPICH" if any(word in words for word in ("HYDRA", "MPICH", "INTEL(R) MPI", "MVAPICH")) else ""
