"""Generic profiles on a real Slurm: a job gets the share of its GPUs of the cores and memory of a node."""

from __future__ import annotations

from pathlib import Path

import pytest

from .cluster import Cluster
from .test_queue_options import submit

pytestmark = [pytest.mark.slurm, pytest.mark.check]


@pytest.mark.parametrize("gpus", [2, 4])
def test_a_job_gets_the_share_of_its_gpus(cluster: Cluster, tmp_path: Path, gpus: int) -> None:
    node = cluster.settings
    job_id = submit(cluster, tmp_path, "--gpus-per-node", str(gpus))
    job = cluster.job(job_id)
    tres = job.get("TRES") or job["ReqTRES"]  # the name since 23.02
    assert int(job["NumCPUs"]) == node.cpus_per_node * gpus // node.gpus_per_node
    assert f"mem={node.memory_mib_per_node * gpus // node.gpus_per_node}M" in tres


def test_more_gpus_than_the_nodes_of_a_partition_have_are_refused(cluster: Cluster, tmp_path: Path) -> None:
    argv = ["ddp-hpc", "render", "--profile", "generic_slurm", "--queue", "long", "--gpus-per-node", "8"]
    done = cluster.run(argv, cwd=tmp_path)
    assert done.returncode == 2
    assert "the nodes of partition long have at most 4. Use --gpus-per-node 4" in done.stderr
