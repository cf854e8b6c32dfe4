"""Checks of the launcher's variables, of mpi4py, of the MPI library that it is bound to, and of mpiexec."""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec
from pathlib import Path

from ddp_hpc.base.errors import LaunchError
from ddp_hpc.base.pip_extras import install_command
from ddp_hpc.discovery import local_mpi
from ddp_hpc.discovery.launcher_environment import batch_shell_tasks
from ddp_hpc.discovery.rank_communication import mpi_library
from ddp_hpc.discovery.world import discover
from ddp_hpc.doctor.check_result import DoctorFinding, Here, fail, first_line, ok, warn

# Prefixes of the variables that launchers set for a rank. If these variables were set, a single MPI process
# would wait for other ranks.
_LAUNCHERS = ("PMI_", "PMIX_", "PALS_", "OMPI_", "PRTE_", "HYDI_", "HYDRA_", "MPI_LOCAL", "MV2_", "SLURM_")
_VERSION_LIMIT_S = 10.0
_TRIAL = "a test with two ranks succeeded"
_NO_MPI = f"{install_command('mpich')}, or load the site's MPI and pip install mpi4py"


def without_launcher(environ: dict[str, str]) -> dict[str, str]:
    """Returns the environment without the variables that MPI launchers set for a rank."""
    return {name: value for name, value in environ.items() if not name.startswith(_LAUNCHERS)}


def launch(here: Here) -> DoctorFinding:
    """Checks whether the launcher's variables identify the rank of this process."""
    try:
        world = discover(here.environ, load_mpi=lambda _family, _title: None)
    except LaunchError as error:
        if batch_shell_tasks(here.environ):
            return warn(f"{error}", "only this node is checked", "batch shell")
        return fail(f"{error}", "run ddp-hpc env to see the variables", "launch error")
    if world.world_size == 1:
        return ok(f"one process ({world.sources['rank']})")
    place = f"rank {world.rank} of {world.world_size}, started by {world.launcher}"
    return ok(place, f"{world.launcher} {world.world_size}")


def mpi4py_binding(here: Here) -> DoctorFinding:
    """Checks the MPI library that mpi4py loads, and whether MPI_Init succeeds in a single process."""
    if find_spec("mpi4py") is None:
        return warn("mpi4py is not installed, so ranks of some MPI launchers cannot be detected", _NO_MPI)
    for name in set(os.environ) - set(without_launcher(dict(os.environ))):
        del os.environ[name]
    if problem := _load_mpi():
        return fail(problem, _NO_MPI)
    from mpi4py import MPI

    library = mpi_library()
    pid = os.fork()  # MPI_Init may terminate the process, and this one must report it
    if pid == 0:
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
        os._exit(0 if MPI.COMM_WORLD.Get_size() == 1 else 3)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code == 0:
        return ok(library)
    text = f"{library}: MPI_Init failed in a single process (exit code {code})"
    if here.in_job:
        return fail(text, "use the launcher; if that fails too, bind mpi4py to the site's MPI")
    return warn(text, "this is common on login nodes; run the check in a job")


def mpi_launcher(here: Here) -> DoctorFinding:
    """Compares the first mpiexec on the PATH with mpi4py's library; outside jobs, also starts two ranks."""
    path = here.environ.get("PATH", os.defpath)
    mpiexec = local_mpi.first_mpiexec(path)
    if mpiexec is None:
        if shutil.which("srun", path=path):
            return ok("no mpiexec on the PATH; ranks are started with srun")
        return warn("neither mpiexec nor srun is on the PATH", _NO_MPI)
    launcher = family_of(version_of(mpiexec))
    if find_spec("mpi4py") is None:
        return warn(f"{mpiexec} ({launcher or 'of unknown type'}), but mpi4py is not installed", _NO_MPI)
    if problem := _load_mpi():
        return fail(f"{mpiexec}, but {problem}", _NO_MPI)
    from mpi4py import MPI

    bound = family_of(MPI.Get_library_version())
    what = f"{mpiexec} is {launcher or 'of unknown type'}, mpi4py is bound to {mpi_library()}"
    remedy = "put the mpiexec of that MPI first on the PATH, or export MPI4PY_LIBMPI=/path/to/libmpi.so"
    # Cray's launchers do not report to which MPI they belong. They start ranks of MPICH.
    if launcher and bound and launcher != bound:
        return fail(what, remedy)
    if here.is_rank or not launcher or here.in_job:
        return ok(what)
    trial = local_mpi.try_two_ranks(mpiexec, without_launcher(dict(here.environ)))
    if trial is local_mpi.Trial.WORKS:
        return ok(f"{what}: {_TRIAL}")
    if trial is local_mpi.Trial.TOO_SLOW:
        return warn(
            f"{what}, but a test with two ranks did not end within {local_mpi.TRIAL_S:g} s",
            "the machine is busy, or mpiexec hangs: repeat the check when the machine is idle",
        )
    return fail(f"{what}, but a test with two ranks failed", remedy)


def _load_mpi() -> str:
    """Imports mpi4py.MPI without MPI_Init; returns the problem, or an empty string."""
    import mpi4py

    mpi4py.rc.initialize = False
    mpi4py.rc.finalize = False
    try:
        from mpi4py import MPI  # noqa: F401 - the import itself is tested
    # mpi4py raises RuntimeError if it cannot load the MPI library.
    except (ImportError, RuntimeError) as error:
        return f"mpi4py cannot be used ({first_line(error)})"
    return ""


def version_of(mpiexec: Path) -> str:
    """Returns the output of `mpiexec --version`; empty if it does not respond."""
    return local_mpi.ask_version(str(mpiexec), _VERSION_LIMIT_S)[1]


def family_of(version: str) -> str:
    """Returns the MPI that printed a version text: `Open MPI`, `MPICH` (or a derivative), or nothing.

    >>> family_of("mpiexec (Open MPI) 5.0.11")
    'Open MPI'
    """
    if local_mpi.is_open_mpi(version):
        return "Open MPI"
    text = version.upper()
    return "MPICH" if any(name in text for name in ("HYDRA", "MPICH", "INTEL(R) MPI", "MVAPICH")) else ""
