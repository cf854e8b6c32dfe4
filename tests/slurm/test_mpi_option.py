"""A program with mpi4py gets the --mpi option that its MPI needs, if nobody has chosen one."""

from __future__ import annotations

from pathlib import Path

import pytest

from .cluster import Cluster
from .submission import SUBMIT
from .test_training import BIN, ENVIRONMENT

pytestmark = [pytest.mark.slurm, pytest.mark.check]

# It runs long enough to be looked at.
PROGRAM = """import time
from mpi4py import MPI
world = MPI.COMM_WORLD
if world.rank == 0:
    print("MPI world", world.size, flush=True)
    time.sleep(3)
"""


def submit(cluster: Cluster, folder: Path, *options: str) -> tuple[str, str]:
    (folder / "uses_mpi.py").write_text(PROGRAM)
    argv = [*SUBMIT, "--nodes", "2", *options, "--", str(BIN / "python"), "uses_mpi.py"]
    queued = cluster.run(argv, env=ENVIRONMENT, cwd=folder)
    assert queued.returncode == 0, queued.stderr
    job = queued.stdout.strip()
    end = cluster.wait(job, timeout=120)
    (log,) = folder.glob(f"*-{job}.out")
    (state,) = folder.glob("runs/*/state")
    return f"{end.state} {state.read_text()}", log.read_text()


def test_pmi2_is_chosen_for_mpich_if_slurms_default_is_none(cluster: Cluster, tmp_path: Path) -> None:
    ended, log = submit(cluster, tmp_path)
    assert ended == "COMPLETED done 0\n", log
    assert "MPI world 2\n" in log
    assert "srun --mpi=pmi2 " in log


def test_a_job_whose_ranks_are_separate_mpi_worlds_fails(cluster: Cluster, tmp_path: Path) -> None:
    ended, log = submit(cluster, tmp_path, "--mpi", "none")
    assert ended.startswith("FAILED failed 0 rank 0 on "), log
    assert "each of the 2 ranks is an MPI world of its own" in ended
    assert log.count("MPI world 1\n") == 2
