"""Finds an mpiexec that works with this mpi4py, for ranks on this machine outside of jobs."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path

from ddp_hpc.base.errors import RequestError
from ddp_hpc.base.pip_extras import install_command

TRIAL_S = 60
_VERSION_S = 10.0
_TRIAL = "from mpi4py import MPI; print('size', MPI.COMM_WORLD.Get_size())"


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


class Trial(Enum):
    """The result of a short test with two ranks."""

    WORKS = "the ranks share one MPI_COMM_WORLD"
    FAILED = "they do not, or mpiexec failed"
    TOO_SLOW = "the test did not end in time, on a busy machine or because mpiexec hangs"


def try_two_ranks(mpiexec: Path, environ: dict[str, str]) -> Trial:
    """Starts two ranks, and returns whether they share one MPI_COMM_WORLD, as far as that is known."""
    argv = [str(mpiexec), "-n", "2", sys.executable, "-c", _TRIAL]
    # The output goes to a file: a pipe could be kept open by remaining child processes.
    with tempfile.TemporaryFile() as output:
        try:
            trial = subprocess.Popen(
                argv,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError:
            return Trial.FAILED
        try:
            trial.wait(TRIAL_S)
        except subprocess.TimeoutExpired:
            return Trial.TOO_SLOW
        finally:
            # If the launcher hangs, its ranks do too, so the whole process group is killed.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(trial.pid, signal.SIGKILL)
            trial.wait()
        output.seek(0)
        works = trial.returncode == 0 and output.read().count(b"size 2") == 2
        return Trial.WORKS if works else Trial.FAILED


def choose_mpiexec(environ: Mapping[str, str]) -> tuple[Path, dict[str, str]]:
    """Returns the mpiexec for ranks on this machine, and the environment in which to start it.

    It is the first mpiexec on the PATH if a short test shows that its ranks share one MPI_COMM_WORLD, and
    otherwise the mpiexec of the `mpich` wheel.

    Raises:
        RequestError: no mpiexec works.
    """
    own, site = bundled_mpiexec(), first_mpiexec(environ.get("PATH", os.defpath))
    if site is not None and (own is None or site.resolve() != own.resolve()):
        its_environ = with_library_of(site, environ)
        if try_two_ranks(site, its_environ) is Trial.WORKS:
            return site, its_environ
        print(f"{site} does not work with mpi4py; using the mpiexec of the mpich wheel", file=sys.stderr)  # noqa: T201 - before click
    if own is None:
        raise RequestError(
            "no mpiexec that works with mpi4py was found on the PATH or in this environment; "
            f"{install_command('mpich')}"
        )
    return own, dict(environ)


def with_library_of(mpiexec: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment in which mpi4py loads the MPI library of this mpiexec.

    Without MPI4PY_LIBMPI, mpi4py would load the libmpi of a wheel in this environment.
    """
    library = _libmpi_of(mpiexec)
    return {**({"MPI4PY_LIBMPI": library} if library else {}), **environ}
