"""`ddp-hpc launch` and the placement check in allocations of a real Slurm."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from .cluster import Cluster
from .test_training import ENVIRONMENT, OPTIONS

pytestmark = [pytest.mark.slurm, pytest.mark.check]

LAUNCH = [sys.executable, "-m", "ddp_hpc", "launch"]
FOUR = ["--nodes=2", "--ntasks-per-node=2"]
TRAIN = ["python", "-m", "ddp_hpc.train", *OPTIONS]


def salloc(
    cluster: Cluster, folder: Path, options: list[str], *words: str
) -> subprocess.CompletedProcess[str]:
    """Runs `ddp-hpc launch` in the shell of an allocation, on the node on which salloc was started."""
    argv = ["salloc", "--quiet", *options, *LAUNCH, *words]
    return cluster.run(argv, env=ENVIRONMENT, cwd=folder, timeout=100)


def test_all_ranks_of_an_allocation_train_and_their_placement_is_recorded(
    cluster: Cluster, tmp_path: Path
) -> None:
    done = salloc(cluster, tmp_path, FOUR, "--env", f"DDP_HPC_RUN_DIR={tmp_path}", "--", *TRAIN)
    assert done.returncode == 0, done.stderr
    assert "4 ranks on 2 nodes of slurm job" in done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("placement: ")]
    assert line.startswith("placement: 4 ranks on 2 nodes, ")
    told = json.loads((tmp_path / "placement.json").read_text())
    assert [rank["host"] for rank in told["ranks"]] == [name for name in cluster.node_names for _ in range(2)]
    assert [rank["allotted_cpus"] for rank in told["ranks"]] == [2] * 4


def test_n_ranks_are_distributed_evenly_and_the_launchers_exit_code_is_returned(
    cluster: Cluster, tmp_path: Path
) -> None:
    said = 'echo $SLURM_PROCID $SLURMD_NODENAME "$1"; test $SLURM_PROCID != 2 || { sleep 2; exit 9; }'
    done = salloc(cluster, tmp_path, FOUR, "-n", "3", "--", "sh", "-c", said, "sh", "a  $(b)")
    first, second = cluster.node_names
    expected = [f"0 {first} a  $(b)", f"1 {first} a  $(b)", f"2 {second} a  $(b)"]
    assert sorted(done.stdout.splitlines()) == expected, done.stderr
    assert done.returncode == 9


def test_more_ranks_than_the_allocation_has_cpus_are_refused(cluster: Cluster, tmp_path: Path) -> None:
    done = salloc(cluster, tmp_path, FOUR, "-n", "5", "--", "true")
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "-n 5 is too large: 2 nodes of slurm job" in line
    assert "with 2 CPUs per node can run 4 ranks" in line
