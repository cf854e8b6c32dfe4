"""A program without ddp-hpc under `ddp-hpc exec` on two nodes of a real Slurm, with each launcher."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .cluster import Cluster
from .submission import SUBMIT
from .test_training import BIN, ENVIRONMENT, PROJECT

pytestmark = [pytest.mark.slurm, pytest.mark.check]

TRAINS = PROJECT / "tests" / "mpi" / "trains.py"


@pytest.mark.parametrize("launcher", ["srun", "mpiexec"])
def test_a_submitted_program_is_one_world_on_both_nodes(
    cluster: Cluster, tmp_path: Path, launcher: str
) -> None:
    argv = [*SUBMIT, "--nodes", "2", "--ranks-per-node", "2", "--launcher", launcher]
    queued = cluster.run([*argv, "--", "python", str(TRAINS)], env=ENVIRONMENT, cwd=tmp_path)
    assert queued.returncode == 0, queued.stderr
    job = queued.stdout.strip()
    end = cluster.wait(job, timeout=150)
    output = (tmp_path / f"ddp-{job}.out").read_text()
    assert (end.state, end.exit_code) == ("COMPLETED", 0), output
    ranks = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    assert sorted((each["rank"], each["size"]) for each in ranks) == [(rank, 4) for rank in range(4)], output
    assert {each["gradient"] for each in ranks} == {1.5}
    places = sorted((each["RANK"], each["GROUP_RANK"], each["LOCAL_RANK"]) for each in ranks)
    assert places == [("0", "0", "0"), ("1", "0", "1"), ("2", "1", "0"), ("3", "1", "1")]
    assert "warning: " not in output


def test_a_program_that_trains_separately_on_each_node_causes_a_warning(
    cluster: Cluster, tmp_path: Path
) -> None:
    program = "import time; time.sleep(2); print('trained')"
    argv = ["srun", "--nodes=2", str(BIN / "ddp-hpc"), "exec", "--", str(BIN / "python"), "-c", program]
    done = cluster.run(argv, env=ENVIRONMENT, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "trained\ntrained\n"), done.stderr
    assert done.stderr.count("warning: 2 ranks were started, but rank 0's program has not opened") == 1
