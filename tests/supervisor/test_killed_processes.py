"""No rank keeps running after its supervisor or its launcher was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import clean_environ
from tests.waiting import wait_until

# A launcher with one rank, which saves its state when it receives SIGTERM.
LAUNCHER = """
trap 'kill $!; exit 1' TERM
bash -c 'trap "touch saved; {after}" TERM; echo $$ >rank; while :; do sleep 0.05; done' &
echo $$ >launcher
wait
"""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "job.sh").write_text("#!/bin/bash\n")
    return tmp_path


def start(directory: Path, after: str = "exit 1") -> subprocess.Popen[bytes]:
    """Starts a supervisor, and waits for its rank. The rank runs `after` when it has saved its state."""
    argv = [sys.executable, "-m", "ddp_hpc.job", "--scheduler", "local", "--script", "job.sh", "--"]
    process = subprocess.Popen(
        [*argv, "bash", "-c", LAUNCHER.replace("{after}", after)],
        cwd=directory,
        env=clean_environ(),
        stderr=subprocess.PIPE,
    )
    names = ("rank", "launcher")  # which exist for a moment before they contain the process ID
    wait_until(lambda: all((directory / name).is_file() and pid_of(directory, name) for name in names))
    return process


def pid_of(directory: Path, name: str) -> int:
    return int((directory / name).read_text() or 0)


def is_over(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def test_ranks_save_and_end_after_their_supervisor_was_killed(directory: Path) -> None:
    supervisor = start(directory)
    os.kill(supervisor.pid, signal.SIGKILL)
    supervisor.communicate()
    wait_until(lambda: is_over(pid_of(directory, "rank")) and is_over(pid_of(directory, "launcher")))
    assert (directory / "saved").exists()


def test_ranks_save_and_end_after_their_launcher_was_killed(directory: Path) -> None:
    supervisor = start(directory)
    os.kill(pid_of(directory, "launcher"), signal.SIGKILL)
    _, err = supervisor.communicate(timeout=60)
    assert supervisor.returncode == 137
    assert b"warning" not in err
    assert is_over(pid_of(directory, "rank"))
    assert (directory / "saved").exists()


@pytest.mark.check
def test_a_rank_that_ignores_sigterm_is_killed_and_named(directory: Path) -> None:
    supervisor = start(directory, after="")
    os.kill(pid_of(directory, "launcher"), signal.SIGKILL)
    _, err = supervisor.communicate(timeout=60)
    assert b"warning: killed processes that outlived the launcher: bash -c trap " in err
    assert is_over(pid_of(directory, "rank"))
