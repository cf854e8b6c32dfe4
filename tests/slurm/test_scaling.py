"""`ddp-hpc bench scaling` in an allocation of a real Slurm."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from .cluster import Cluster
from .test_training import ENVIRONMENT

pytestmark = [pytest.mark.slurm, pytest.mark.check]

BENCH = ["bench", "scaling", "--nodes", "1,2", "--ranks-per-node", "1", "--mode", "weak", "--json", "s.json"]
SHORT = ["--steps", "4", "--warm-up", "2", "--batch-size", "4", "--", "--model", "linear", "--threads", "1"]


def test_points_on_one_and_two_nodes_of_an_allocation(cluster: Cluster, tmp_path: Path) -> None:
    argv = ["salloc", "--quiet", "--nodes=2", sys.executable, "-m", "ddp_hpc", *BENCH, *SHORT]
    done = cluster.run(argv, env=ENVIRONMENT, cwd=tmp_path, timeout=100)
    assert done.returncode == 0, done.stderr
    small, large = json.loads((tmp_path / "s.json").read_text())["rows"]
    assert [(row["ranks"], row["nodes"]) for row in (small, large)] == [(1, 1), (2, 2)]
    assert large["efficiency"] == pytest.approx(large["samples_per_s"] / small["samples_per_s"] / 2)
    assert 0 < large["comm_share"] < 1
