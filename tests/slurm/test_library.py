"""A user's script with the library on two nodes of a real Slurm."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.conftest import PROJECT

from .cluster import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.check]

SCRIPT = """
import torch
from torch import nn
import ddp_hpc

with ddp_hpc.distributed(threads=1) as world:
    print(f"rank {world.rank}: local {world.local_rank}, node {world.node_rank} of {world.num_nodes}")
    torch.manual_seed(0)
    model = ddp_hpc.wrap(nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for batch in world.loader((torch.rand(50, 4), torch.zeros(50, 1)), batch_size=4):
        optimizer.zero_grad()
        (nn.functional.mse_loss(model(batch.src), batch.tgt) * batch.weight).backward()
        optimizer.step()
    world.say(f"{batch.step} steps")
"""


def test_srun_starts_a_script_on_both_nodes(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SCRIPT)
    argv = ["srun", "--nodes=2", "--ntasks-per-node=2", sys.executable, "mine.py"]
    done = cluster.run(argv, env={"PYTHONPATH": str(PROJECT)}, cwd=tmp_path, timeout=100)
    assert done.returncode == 0, done.stderr
    places = [(0, 0, 0), (1, 1, 0), (2, 0, 1), (3, 1, 1)]
    told = [f"rank {rank}: local {local}, node {node} of 2" for rank, local, node in places]
    assert sorted(done.stdout.splitlines()) == ["4 steps", *told]
