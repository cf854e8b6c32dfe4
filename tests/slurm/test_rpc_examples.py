"""The parameter servers of docs/examples/rpc on two nodes, started with srun."""

import json
import sys
from pathlib import Path

import pytest

from tests.conftest import PROJECT
from tests.examples.test_rpc import EXAMPLES, MONARCH

from .cluster import Cluster

pytestmark = pytest.mark.slurm

THREE = ["srun", "--nodes=2", "--ntasks=3"]


@pytest.mark.soak
@pytest.mark.parametrize("example", [*EXAMPLES, MONARCH])
def test_trainers_on_two_nodes_connect_to_the_server(cluster: Cluster, example: str) -> None:
    script: Path = PROJECT / "docs" / "examples" / "rpc" / example
    argv = [*THREE, sys.executable, script, "--steps", "50"]
    done = cluster.run(argv, env={"PYTHONPATH": str(PROJECT)}, timeout=100)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["num_updates"] == 100
