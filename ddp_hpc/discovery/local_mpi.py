"""`python -m ddp_hpc.discovery.local_mpi [MPIEXEC] -- ARGS...`: an mpiexec that works with this mpi4py.

It uses the first mpiexec on the PATH if a short trial shows that its ranks share one MPI_COMM_WORLD, and
otherwise the mpiexec of the `mpich` wheel. `make train` runs this module. Job scripts do not need it, because
the site's profile names the launcher.
"""

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
from typing import NoReturn

from ddp_hpc.base.errors import EXIT_WRONG_REQUEST, RequestError
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
        if found := shutil.which("mpiexec", path=directory or os.curdir):
            yield Path(found).absolute()


def first_mpiexec(path: str) -> Path | None:
    """Returns the first mpiexec on a PATH that is not PBS's own, or None."""
    found = (one for one in mpiexecs_on(path) if not is_pbs_mpiexec(ask_version(str(one), _VERSION_S)[1]))
    return next(found, None)


def is_pbs_mpiexec(version: str) -> bool:
    """Returns whether the version text is that of PBS's mpiexec, a script that is not an MPI launcher."""
    return version.startswith("pbs_version")


def is_open_mpi(version: str) -> bool:
    """Returns whether the version text is that of an mpiexec or a library of Open MPI."""
    return any(word in version for word in ("Open MPI", "OpenRTE", "PRRTE"))


def is_hydra(version: str) -> bool:
    """Returns whether the version text is that of an mpiexec of MPICH or Intel MPI."""
    return any(word in version for word in ("HYDRA", "Hydra", "Intel(R) MPI"))


def libmpi_of(mpiexec: Path) -> str | None:
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


def works_with_mpi4py(mpiexec: Path, environ: dict[str, str]) -> bool:
    """Starts two ranks and returns whether they share one MPI_COMM_WORLD."""
    return try_two_ranks(mpiexec, environ) is Trial.WORKS


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


def choose_mpiexec(wanted: str | None) -> tuple[Path, dict[str, str], str]:
    """Returns the mpiexec, the environment to start it in, and the reason for the choice.

    Raises:
        RequestError: no mpiexec works, or the specified one does not exist.
    """
    own, environ = bundled_mpiexec(), dict(os.environ)
    found = shutil.which(wanted) if wanted else first_mpiexec(environ.get("PATH", os.defpath))
    site = Path(found) if found else None
    if wanted and site is None:
        raise RequestError(
            f"{wanted} is not an executable program; specify an mpiexec: make MPIEXEC=/path/to/mpiexec"
        )
    if site is not None and is_pbs_mpiexec(ask_version(str(site), _VERSION_S)[1]):
        raise RequestError(f"{site} is PBS's own mpiexec, not an MPI launcher; specify another mpiexec")
    if site is not None and (own is None or site.resolve() != own.resolve()):
        library = libmpi_of(site)
        if library is not None:
            # Without MPI4PY_LIBMPI, mpi4py would load the libmpi of a wheel in this environment.
            environ.setdefault("MPI4PY_LIBMPI", library)
        if wanted or works_with_mpi4py(site, environ):
            return site, environ, "as specified" if wanted else "found on the PATH; works with mpi4py"
        print(f"{site} does not work with mpi4py; using the mpiexec of the mpich wheel", file=sys.stderr)  # noqa: T201 - before click
    if own is None:
        raise RequestError(
            "no mpiexec that works with mpi4py was found on the PATH or in this environment; "
            f"{install_command('mpich')}"
        )
    return own, dict(os.environ), "from the mpich wheel"


def main(argv: list[str]) -> NoReturn:
    """Replaces this process with mpiexec; exits with code 2 if no mpiexec works."""
    if "--" not in argv or argv.index("--") > 1:
        sys.exit(
            _print_error("usage: python -m ddp_hpc.discovery.local_mpi [MPIEXEC] -- ARGUMENTS OF MPIEXEC")
        )
    split = argv.index("--")
    try:
        mpiexec, environ, why = choose_mpiexec(argv[0] if split else None)
    except RequestError as error:
        sys.exit(_print_error(f"error: {error}"))
    print(f"mpiexec: {mpiexec} ({why})", file=sys.stderr)  # noqa: T201 - before click
    os.execve(mpiexec, [str(mpiexec), *argv[split + 1 :]], environ)  # noqa: S606 - an argv list


def _print_error(line: str) -> int:
    print(line, file=sys.stderr)  # noqa: T201 - before click
    return EXIT_WRONG_REQUEST


if __name__ == "__main__":
    main(sys.argv[1:])
