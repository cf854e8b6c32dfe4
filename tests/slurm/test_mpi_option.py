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


def submit(
    cluster: Cluster, folder: Path, *options: str, program: str = PROGRAM, python: Path = BIN / "python"
) -> tuple[str, str]:
    (folder / "uses_mpi.py").write_text(program)
    argv = [*SUBMIT, "--nodes", "2", *options, "--", str(python), "uses_mpi.py"]
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
    assert "each of the 2 ranks has its own MPI_COMM_WORLD" in ended
    assert log.count("MPI world 1\n") == 2


@pytest.mark.parametrize(
    ("options", "python"),
    [((), "bin/python"), (("--mpi", "pmix"), "openmpi/bin/python")],
    ids=["pmi2", "pmix"],
)
def test_mpi_works_in_the_child_that_has_a_log_of_its_own(
    cluster: Cluster, tmp_path: Path, options: tuple[str, ...], python: str
) -> None:
    program = "from mpi4py.MPI import COMM_WORLD as c; print(c.rank, c.size, c.allreduce(1))"
    options = (*options, "--ranks-per-node", "2", "--rank-logs")
    ended, log = submit(cluster, tmp_path, *options, program=program, python=BIN.parent / python)
    assert ended == "COMPLETED done 0\n", log
    logs = {path.name: path.read_text() for path in tmp_path.glob("runs/*/logs/attempt-1/*/*.log")}
    assert logs == {f"rank-{rank}.log": f"{rank} 4 4\n" for rank in range(4)}
