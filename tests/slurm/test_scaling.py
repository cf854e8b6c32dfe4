"""`ddp-hpc bench scaling` with jobs of a real Slurm."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .cluster import Cluster
from .survival_runs import PROJECT
from .test_queue import ddp_hpc

pytestmark = [pytest.mark.slurm, pytest.mark.check]

JOBS = ["--profile", "generic_slurm", "--ranks-per-node", "1", "--walltime", "00:05:00", "--nodes", "1,2"]
BENCH = ["--mode", "weak", "--steps", "4", "--warm-up", "2", "--batch-size", "4"]
TRAINING = ["--model", "linear", "--threads", "1", "--init-timeout", "60"]


def test_points_on_one_and_two_nodes_are_queued_awaited_and_collected(
    cluster: Cluster, tmp_path: Path
) -> None:
    env = {"PYTHONPATH": str(PROJECT)}
    request = ["bench", "scaling", "--submit", *JOBS, *BENCH, "--", *TRAINING]
    done = ddp_hpc(cluster, tmp_path, *request, env=env)
    assert done.returncode == 0, done.stderr
    ids = done.stdout.split()
    assert len(ids) == 2
    again = ddp_hpc(cluster, tmp_path, *request, env=env)
    assert (again.returncode, again.stdout) == (0, ""), "they wait or run"
    done = ddp_hpc(cluster, tmp_path, "bench", "scaling", "--gather", "--wait", "--json", "s.json")
    logs = "".join(cluster.job_output(job_id) for job_id in ids)
    assert done.returncode == 0, done.stderr + logs
    one, two = json.loads((tmp_path / "s.json").read_text())["rows"]
    assert [(row["ranks"], row["nodes"], row["ranks_per_node"]) for row in (one, two)] == [
        (1, 1, 1),
        (2, 2, 1),
    ]
    assert two["efficiency"] == pytest.approx(two["samples_per_s"] / one["samples_per_s"] / 2)
    assert 0 < two["comm_share"] < 1
    folder = tmp_path / "scaling" / "ranks2-batch4"
    assert not (folder / "snapshots").exists()
    assert [line.split()[:2] for line in (folder / "attempts").read_text().splitlines()] == [["1", ids[1]]]
