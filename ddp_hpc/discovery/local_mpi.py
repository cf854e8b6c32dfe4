"""Finds the mpiexecs of this machine, and tells to which MPI they belong."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

_VERSION_S = 10.0


def bundled_mpiexec() -> Path | None:
    """Returns the mpiexec of the `mpich` wheel in this Python environment, or None."""
    path = Path(sys.prefix) / "bin" / "mpiexec"
    return path if path.exists() else None


def ask_version(mpiexec: str, limit_s: float, environ: Mapping[str, str] | None = None) -> tuple[int, str]:
    """Returns the exit code and output of `mpiexec --version`; 1 and an empty text if it does not answer."""
    try:
        done = subprocess.run(
            [mpiexec, "--version"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=None if environ is None else dict(environ),
            timeout=limit_s,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return 1, ""
    return done.returncode, done.stdout.decode("utf-8", "replace")


def mpiexecs_on(path: str) -> Iterator[Path]:
    """Yields every mpiexec on a PATH in order, including PBS's own."""
    for directory in path.split(os.pathsep):
        if mpiexec := shutil.which("mpiexec", path=directory or os.curdir):
            yield Path(mpiexec).absolute()


def first_mpiexec(path: str) -> Path | None:
    """Returns the first mpiexec on a PATH that is not PBS's own, or None."""
    for mpiexec in mpiexecs_on(path):
        if not is_pbs_mpiexec(ask_version(str(mpiexec), _VERSION_S)[1]):
            return mpiexec
    return None


def is_pbs_mpiexec(version: str) -> bool:
    """Returns whether the version text is that of PBS's mpiexec, a script that is not an MPI launcher."""
    return version.startswith("pbs_version")


def is_open_mpi(version: str) -> bool:
    """Returns whether the version text is that of an mpiexec or a library of Open MPI."""
    return any(word in version for word in ("Open MPI", "OpenRTE", "PRRTE"))


def is_hydra(version: str) -> bool:
    """Returns whether the version text is that of an mpiexec of MPICH or Intel MPI."""
    return any(word in version for word in ("HYDRA", "Hydra", "Intel(R) MPI"))


def _libmpi_of(mpiexec: Path) -> str | None:
    """Returns the path of the MPI library that is installed with this mpiexec; None if it is elsewhere."""
    root = mpiexec.resolve().parent.parent
    for directory in ("lib", "lib64"):
        # libmpi.so comes last, because it may be a linker script, which cannot be loaded.
        for name in ("libmpi.so.12", "libmpi.so.40", "libmpi.so"):
            if (root / directory / name).exists():
                return str(root / directory / name)
    return None


def library_of(mpiexec: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variable with which mpi4py loads the MPI library of this mpiexec, unless it is set.

    Otherwise, mpi4py would load the libmpi of a wheel in this environment.
    """
    library = None if "MPI4PY_LIBMPI" in environ else _libmpi_of(mpiexec)
    return {"MPI4PY_LIBMPI": library} if library else {}
