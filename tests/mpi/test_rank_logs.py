"""With --rank-logs, every rank of a launcher writes its output to a file of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ddp_hpc.base.attempt_end import rank_log
from ddp_hpc.discovery.world import short_hostname
from tests.conftest import PROJECT, Launch
from tests.waiting import wait_until

from .conftest import OPENMPI_SETTINGS, errors

PROGRAM = (
    "import os, sys, time, mpi4py.MPI\n"
    "rank = mpi4py.MPI.COMM_WORLD.rank\n"
    "print('rank', rank)\n"
    "print('warning: odd', rank, file=sys.stderr)\n"
)
MINE = """
import os, time, torch

class Net(torch.nn.Linear):
    def forward(self, src):
        time.sleep(0.2)
        if os.environ.get("FAILS") == os.environ.get("PMI_RANK", ""):
            raise ValueError("bad")
        return super().forward(src)

def net():
    os.write(1, b"made by C\\n")
    print("made by Python")
    return Net(20, 1)
"""


def env_of(run_dir: Path, **more: str) -> dict[str, str]:
    of_job = {"DDP_HPC_RUN_DIR": str(run_dir), "DDP_HPC_THIS_ATTEMPT": "1 17", "DDP_HPC_RANK_LOGS": "1"}
    return {**of_job, **more}


def output_of(run_dir: Path, rank: int) -> str:
    (path,) = run_dir.glob(rank_log(1, "*", rank))
    return path.read_text()


@pytest.mark.parametrize("mpi", ["mpich", pytest.param("openmpi", marks=pytest.mark.check)])
def test_ranks_of_exec_write_to_their_files(
    launch: Launch, request: pytest.FixtureRequest, tmp_path: Path, mpi: str
) -> None:
    mpiexec = request.getfixturevalue("mpiexec" if mpi == "mpich" else "openmpi_mpiexec")
    python = sys.executable if mpi == "mpich" else request.getfixturevalue("openmpi_python")
    argv = [mpiexec, "-n", "3", python, "-m", "ddp_hpc.exec", python, "-c", PROGRAM]
    ended = launch(argv, env=env_of(tmp_path, **OPENMPI_SETTINGS), timeout_s=60)
    assert (ended.exit_code, ended.stdout) == (0, "rank 0\n"), ended.stderr
    for rank in range(3):
        assert sorted(output_of(tmp_path, rank).splitlines()) == [f"rank {rank}", f"warning: odd {rank}"]
        assert ended.stderr.count(f"warning: odd {rank}\n") == 1


def train(
    run_dir: Path,
    mpiexec: Path,
    launch: Launch,
    *options: str,
    python: Path = Path(sys.executable),
    **env: str,
) -> subprocess.Popen[str]:
    """Starts a training of 2 ranks."""
    run_dir.with_name("mine.py").write_text(MINE)
    env = env_of(run_dir, PYTHONPATH=f"{run_dir.parent}:{PROJECT}", **env)
    data = ["--src-shape", "20", "--tgt-shape", "1", "--num-samples", "4096"]
    argv = [mpiexec, "-n", "2", python, "-m", "ddp_hpc.train", "--model", "mine:net", *data, *options]
    return launch.start(argv, env=env, cwd=run_dir.parent)


def test_ranks_of_a_training_write_to_their_files_and_save_their_state_after_a_signal(
    launch: Launch, mpiexec: Path, tmp_path: Path
) -> None:
    process = train(tmp_path / "run", mpiexec, launch)
    state = tmp_path / "run" / "state"
    wait_until(lambda: process.poll() is not None or (state.exists() and "running" in state.read_text()))
    process.terminate()
    ended = launch.end(process, 60)
    assert ended.exit_code == 75, ended.stderr
    assert state.read_text().startswith("requeue ")
    assert {*ended.stdout.splitlines()} <= {*output_of(tmp_path / "run", 0).splitlines()}
    assert "world: 2 ranks on 1 node" in ended.stdout
    assert ended.stdout.count("made by ") == 2
    assert output_of(tmp_path / "run", 1) == "made by C\nmade by Python\n"


@pytest.mark.check
def test_ranks_of_a_training_with_open_mpi_write_to_their_files(
    launch: Launch, openmpi_mpiexec: Path, openmpi_python: Path, tmp_path: Path
) -> None:
    words = ("--max-steps", "3", "--discovery", "mpi")
    process = train(
        tmp_path / "run", openmpi_mpiexec, launch, *words, python=openmpi_python, **OPENMPI_SETTINGS
    )
    ended = launch.end(process, 120)
    assert ended.exit_code == 0, ended.stderr
    assert "world: 2 ranks on 1 node (mpi)" in ended.stdout
    assert output_of(tmp_path / "run", 1) == "made by C\nmade by Python\n"


@pytest.mark.check
def test_a_rank_of_a_training_that_fails_is_reported(launch: Launch, mpiexec: Path, tmp_path: Path) -> None:
    ended = launch.end(train(tmp_path / "run", mpiexec, launch, FAILS="1"), 120)
    assert ended.exit_code == 1
    (line,) = errors(ended)
    assert line.startswith(f"[rank 1/2 {short_hostname()}] error: ")
    assert line in output_of(tmp_path / "run", 1)
