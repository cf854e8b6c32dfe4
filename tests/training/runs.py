"""Starts `python -m ddp_hpc.train` like a user: with real processes, real launchers and a time limit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.conftest import Launch, clean_environ
from tests.waiting import PATIENCE

BIN = Path(sys.executable).parent
# A Transformer that is fast on two cores: the default layers with an embedding of 64.
SMALL = ["--src-shape", "1,64", "--tgt-shape", "20,64"]
# For tests that do not depend on the model: it takes less time than the start of Python.
LINEAR = ["--model", "linear", "--src-shape", "20", "--tgt-shape", "1"]


def start(ranks: int, launcher: str = "mpiexec") -> list[str]:
    """The command before `-m ddp_hpc.train` or a script."""
    if launcher == "torchrun":
        torchrun = [sys.executable, "-m", "torch.distributed.run"]  # the script may be in another directory
        return [*torchrun, "--standalone", f"--nproc-per-node={ranks}"]
    if ranks == 1:
        return [sys.executable]
    return [str(BIN / "mpiexec"), "-n", str(ranks), sys.executable]


def train(
    *options: str,
    cwd: Path,
    ranks: int = 1,
    launcher: str = "mpiexec",
    program: list[str] | None = None,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 120.0,
) -> subprocess.CompletedProcess[str]:
    """Waits for a run. After a time limit, all its processes are killed and the test fails."""
    argv = [*start(ranks, launcher), *(program or ["-m", "ddp_hpc.train"]), *options]
    return run(argv, cwd, env, timeout_s)


def run(
    argv: list[str], cwd: Path, env: Mapping[str, str] | None = None, timeout_s: float = 120.0
) -> subprocess.CompletedProcess[str]:
    """Runs any command in a new session."""
    process = subprocess.Popen(
        argv,
        cwd=cwd,
        env=clean_environ(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=PATIENCE * timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        raise AssertionError(f"{argv} took more than {PATIENCE * timeout_s:g} s\n{out}\n{err}") from None
    except BaseException:  # Ctrl-C, or the time limit of a test in benchmarks/gpu
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return subprocess.CompletedProcess(argv, process.returncode, out, err)


def succeeded(done: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    """Returns the run, which must have succeeded."""
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def losses(metrics: Path) -> list[float]:
    """The loss of every step."""
    return [record["loss"] for record in records(metrics)]


def trained_losses(*options: str, cwd: Path, timeout_s: float = 120.0) -> list[float]:
    """The losses of a run of one process with these options. Each run in `cwd` has its own metrics file."""
    name = f"{len(list(cwd.glob('*.jsonl')))}.jsonl"
    succeeded(train(*options, "--metrics", name, cwd=cwd, timeout_s=timeout_s))
    return losses(cwd / name)


def records(metrics: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file."""
    return [json.loads(line) for line in metrics.read_text().splitlines()]


def error_lines(done: subprocess.CompletedProcess[str]) -> list[str]:
    """The lines of stderr with an error of this package."""
    return [line for line in done.stderr.splitlines() if "error: " in line.lower()]


class MpiJob:
    """A `Job` under mpiexec."""

    def __init__(self, launch: Launch, options: Sequence[str], cwd: Path) -> None:
        self._process = launch.start([*start(2), "-m", "ddp_hpc.train", *options], cwd=cwd)

    def running(self) -> bool:
        return self._process.poll() is None

    def words(self) -> str:
        return "".join(self._process.communicate())

    def kill(self) -> None:
        """Sends SIGKILL to mpiexec and all of its processes, in all process groups."""
        session = ["pgrep", "-s", str(self._process.pid)]
        for pid in subprocess.run(session, capture_output=True, text=True).stdout.split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def wait(self) -> None:
        self._process.communicate(timeout=30)
