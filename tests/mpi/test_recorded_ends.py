"""In a job with a supervisor, `ddp-hpc exec` records how the ranks of any program end."""

from __future__ import annotations

import os
import pty
import signal
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from ddp_hpc.base.attempt_end import rank_0_end, read_end
from ddp_hpc.base.run_outcomes import Cause
from tests.conftest import Launch, clean_environ
from tests.waiting import wait_until

from .conftest import OPENMPI_SETTINGS

ATTEMPT = "1 17"
EXEC = (sys.executable, "-m", "ddp_hpc.exec", sys.executable, "-c")
MPI_SIZE = "import time; from mpi4py.MPI import COMM_WORLD as c; print('size', c.size); time.sleep(1)"


def job(run_dir: Path, **more: str) -> dict[str, str]:
    return {"DDP_HPC_RUN_DIR": str(run_dir), "DDP_HPC_THIS_ATTEMPT": ATTEMPT, **more}


@pytest.mark.parametrize(
    ("program", "exit_code", "cause"),
    [
        ("os._exit(3)", 3, Cause.EXITED),
        ("os.kill(os.getpid(), 9)", 137, Cause.LOST_RANK),
    ],
)
def test_the_rank_that_fails_first_is_recorded(
    launch: Launch, mpiexec: Path, tmp_path: Path, program: str, exit_code: int, cause: Cause
) -> None:
    text = f"import os, sys, time\nif os.environ['RANK'] == '1': {program}\ntime.sleep(60)"
    # The launcher's exit code is lost, as in `mpiexec ... | tee log`.
    lost = ["sh", "-c", 'mpiexec=$1; shift; "$mpiexec" "$@"; exit 0', "sh", mpiexec, "-n", "2"]
    with_init = "import mpi4py.MPI\n" + text  # without MPI_Init, Hydra lets the other rank continue
    assert launch([*lost, *EXEC, with_init], env=job(tmp_path)).exit_code == 0
    end = read_end(tmp_path, ATTEMPT)
    assert end is not None
    assert (end.rank, end.exit_code, end.cause) == (1, exit_code, cause)
    assert rank_0_end(tmp_path, ATTEMPT) is None  # it was terminated


def test_a_rank_ends_as_its_program_ended(launch: Launch, tmp_path: Path) -> None:
    assert launch([*EXEC, "exit(3)"], env=job(tmp_path)).exit_code == 3
    killed = launch([*EXEC, "import os; os.kill(os.getpid(), 9)"], env=job(tmp_path))
    assert killed.exit_code == -signal.SIGKILL
    assert rank_0_end(tmp_path, ATTEMPT) == 137


def test_a_rank_that_outlives_its_attempt_records_nothing(launch: Launch, tmp_path: Path) -> None:
    """Its node was cut off, and the next attempt of the job uses the run directory."""
    later = "(run / 'attempts').write_text('2 17 5 2000\\n'); (run / 'rank_0').write_text('2 17 began\\n')"
    program = f"import pathlib; run = pathlib.Path({str(tmp_path)!r}); {later}; exit(3)"
    assert launch([*EXEC, program], env=job(tmp_path)).exit_code == 3
    assert not (tmp_path / "end").exists()
    assert rank_0_end(tmp_path, "2 17") is None  # it runs


def test_exit_code_75_is_not_a_failure(launch: Launch, tmp_path: Path) -> None:
    assert launch([*EXEC, "exit(75)"], env=job(tmp_path)).exit_code == 75
    assert (rank_0_end(tmp_path, ATTEMPT), read_end(tmp_path, ATTEMPT)) == (75, None)


def test_a_signal_reaches_the_program_once_and_its_end_is_not_a_failure(
    launch: Launch, tmp_path: Path
) -> None:
    program = (
        "import signal, sys, time\n"
        "got = []\n"
        "signal.signal(signal.SIGTERM, lambda *_: got.append(1))\n"
        "print('ready', flush=True)\n"
        "while not got: time.sleep(0.01)\n"
        "time.sleep(0.3); print(len(got)); sys.exit(9)\n"
    )
    process = launch.start([*EXEC, program], env=job(tmp_path))
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    os.killpg(process.pid, signal.SIGTERM)  # launchers send signals to the whole process group
    ended = launch.end(process)
    assert (ended.stdout, ended.exit_code) == ("1\n", 9)
    assert (rank_0_end(tmp_path, ATTEMPT), read_end(tmp_path, ATTEMPT)) == (9, None)


def test_a_program_in_a_terminal_can_read_from_it_and_gets_ctrl_c_once(tmp_path: Path) -> None:
    program = (
        "import signal, sys, time\n"
        "got = []\n"
        "signal.signal(signal.SIGINT, lambda *_: got.append(1))\n"
        "print('read', input(), flush=True)\n"
        "while not got: time.sleep(0.01)\n"
        "time.sleep(0.3); print('got', len(got)); sys.exit(9)\n"
    )
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(EXEC[0], [*EXEC, program], clean_environ(job(tmp_path)))
    os.write(terminal, b"text\n")
    shown = os.read(terminal, 4096)
    while b"read text" not in shown:
        shown += os.read(terminal, 4096)
    os.write(terminal, b"\x03")
    with suppress(OSError):  # the terminal has been closed
        while chunk := os.read(terminal, 4096):
            shown += chunk
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9, shown
    assert b"got 1" in shown


@pytest.mark.check
def test_the_program_does_not_outlive_a_killed_rank(launch: Launch, tmp_path: Path) -> None:
    program = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    process = launch.start([*EXEC, program], env=job(tmp_path))
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    process.kill()
    wait_until(lambda: not Path(f"/proc/{pid}").exists())
    assert rank_0_end(tmp_path, ATTEMPT) is None


def test_a_full_disk_does_not_prevent_the_end(launch: Launch) -> None:
    ended = launch([*EXEC, "exit(3)"], env=job(Path("/proc/nonesuch")))
    assert ended.exit_code == 3
    assert "warning: /proc/nonesuch/" in ended.stderr


@pytest.mark.check
def test_a_program_whose_mpi_knows_all_ranks_is_done(launch: Launch, mpiexec: Path, tmp_path: Path) -> None:
    ended = launch([mpiexec, "-n", "2", *EXEC, MPI_SIZE], env=job(tmp_path))
    assert ended.stdout == "size 2\nsize 2\n"
    assert "warning: 2 ranks were started, but rank 0's program uses" not in ended.stderr
    assert read_end(tmp_path, ATTEMPT) is None


@pytest.mark.check
def test_ranks_that_are_mpi_worlds_of_their_own_are_a_failure(
    launch: Launch, mpiexec: Path, openmpi_python: Path, tmp_path: Path
) -> None:
    """mpi4py with Open MPI under the mpiexec of MPICH."""
    argv = [mpiexec, "-n", "2", openmpi_python, *EXEC[1:3], openmpi_python, "-c", MPI_SIZE]
    ended = launch(argv, env=job(tmp_path, **OPENMPI_SETTINGS))
    assert ended.stdout == "size 1\nsize 1\n"
    assert ended.stderr.count("warning: 2 ranks were started, but rank 0's program uses Open MPI") == 1
    end = read_end(tmp_path, ATTEMPT)
    assert end is not None
    assert "each of the 2 ranks has its own MPI_COMM_WORLD" in end.reason
    assert end.exit_code == 1
