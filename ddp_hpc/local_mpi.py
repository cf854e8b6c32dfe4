"""`python -m ddp_hpc.local_mpi [MPIEXEC] -- ARGS...`: runs the mpiexec that goes with this Python's mpi4py.

A site's own mpiexec (a loaded module) is used where a short trial shows that
two ranks of it find each other; else the one of the `mpich` wheel. `make train`
stands on this; job scripts do not, as there the site is known.
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
from pathlib import Path
from typing import NoReturn

from ddp_hpc.errors import EXIT_WRONG_REQUEST, RequestError

_TRIAL_S = 60
_VERSION_S = 10.0
_TRIAL = "from mpi4py import MPI; print('size', MPI.COMM_WORLD.Get_size())"


def embedded() -> Path | None:
    """The mpiexec beside this Python, which the `mpich` wheel brings."""
    path = Path(sys.prefix) / "bin" / "mpiexec"
    return path if path.exists() else None


def ask_version(mpiexec: str, limit_s: float, environ: Mapping[str, str] | None = None) -> tuple[int, str]:
    """Exit code of `mpiexec --version` and what it prints; 1 and nothing where it gives no answer."""
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
    """Every mpiexec on a PATH, in its order; PBS's own too."""
    for folder in path.split(os.pathsep):
        if found := shutil.which("mpiexec", path=folder or os.curdir):
            yield Path(found).absolute()


def is_of_pbs(version: str) -> bool:
    """Whether that is what PBS's mpiexec says: a script that looks for another one, and no MPI launcher."""
    return version.startswith("pbs_version")


def is_open_mpi(version: str) -> bool:
    """Whether that is what an mpiexec, or a library, of Open MPI says of itself."""
    return any(word in version for word in ("Open MPI", "OpenRTE", "PRRTE"))


def libmpi_of(mpiexec: Path) -> str | None:
    """The MPI library in the same installation as an mpiexec; None where it lies elsewhere."""
    root = mpiexec.resolve().parent.parent
    for folder in ("lib", "lib64"):
        # The bare name comes last: it may be a text for the linker, which cannot be loaded.
        for name in ("libmpi.so.12", "libmpi.so.40", "libmpi.so"):
            if (root / folder / name).exists():
                return str(root / folder / name)
    return None


def works(mpiexec: Path, environ: dict[str, str]) -> bool:
    """True where two ranks started by it share one MPI_COMM_WORLD."""
    argv = [str(mpiexec), "-n", "2", sys.executable, "-c", _TRIAL]
    # A file takes the output: a pipe would keep one waiting for whoever else holds it.
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
            return False
        try:
            trial.wait(_TRIAL_S)
        except subprocess.TimeoutExpired:
            return False
        finally:
            # A launcher that hangs has ranks that hang: they go with it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(trial.pid, signal.SIGKILL)
            trial.wait()
        output.seek(0)
        return trial.returncode == 0 and output.read().count(b"size 2") == 2


def choose(wanted: str | None) -> tuple[Path, dict[str, str], str]:
    """The mpiexec, the environment to start it in, and the reason it was taken.

    Raises:
        RequestError: there is none, or not the one that was named.
    """
    own, environ = embedded(), dict(os.environ)
    on_path = shutil.which(wanted) if wanted else _first_on_path()
    if wanted and on_path is None:
        raise RequestError(
            f"{wanted} is no program that can be run; name an mpiexec: make MPIEXEC=/path/to/it"
        )
    if on_path is not None and is_of_pbs(ask_version(on_path, _VERSION_S)[1]):
        raise RequestError(f"{on_path} is PBS's own mpiexec, which is no MPI launcher; name another")
    if on_path is not None and (own is None or Path(on_path).resolve() != own.resolve()):
        site = Path(on_path)
        library = libmpi_of(site)
        if library is not None:
            # A wheel's libmpi in this environment would be found first.
            environ.setdefault("MPI4PY_LIBMPI", library)
        if wanted or works(site, environ):
            return site, environ, "named by you" if wanted else "found on the PATH, and mpi4py works with it"
        print(f"{site} does not start ranks that mpi4py can join: using the embedded one", file=sys.stderr)  # noqa: T201 - before click
    if own is None:
        raise RequestError(
            "no mpiexec on the PATH that mpi4py works with, and none in this environment; "
            "pip install 'ddp-hpc[mpich]'"
        )
    return own, dict(os.environ), "of the mpich wheel"


def _first_on_path() -> str | None:
    found = map(str, mpiexecs_on(os.environ.get("PATH", os.defpath)))
    return next((one for one in found if not is_of_pbs(ask_version(one, _VERSION_S)[1])), None)


def main(argv: list[str]) -> NoReturn:
    """Becomes mpiexec; exit code 2 where there is none."""
    if "--" not in argv or argv.index("--") > 1:
        sys.exit(_wrong("usage: python -m ddp_hpc.local_mpi [MPIEXEC] -- ARGUMENTS OF MPIEXEC"))
    split = argv.index("--")
    try:
        mpiexec, environ, why = choose(argv[0] if split else None)
    except RequestError as error:
        sys.exit(_wrong(f"error: {error}"))
    print(f"mpiexec: {mpiexec} ({why})", file=sys.stderr)  # noqa: T201 - before click
    os.execve(mpiexec, [str(mpiexec), *argv[split + 1 :]], environ)  # noqa: S606 - an argv list


def _wrong(line: str) -> int:
    print(line, file=sys.stderr)  # noqa: T201 - before click
    return EXIT_WRONG_REQUEST


if __name__ == "__main__":
    main(sys.argv[1:])
