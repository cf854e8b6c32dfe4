"""`ddp-hpc env`: real processes in recorded environments."""

import json
import os
import socket
import sys

import pytest
import torch

from ddp_hpc.discovery.rank_placement import cpu_list
from tests.conftest import Launch
from tests.environments import load

ENV = [sys.executable, "-m", "ddp_hpc", "env"]
# Only the variables of the launcher: recorded paths belong to another machine.
FOREIGN = ("PATH", "HOME", "LD_LIBRARY_PATH", "PYTHONPATH")


def as_recorded(case: str, rank: int) -> dict[str, str]:
    return {name: value for name, value in load(case, rank).items() if name not in FOREIGN}


def test_json_contains_each_value_with_its_source(launch: Launch) -> None:
    ended = launch([*ENV, "--json"], env=as_recorded("srun-uneven", 2))
    assert ended.exit_code == 0, ended.stderr
    report = json.loads(ended.stdout)
    assert report["launcher"] == "slurm"
    assert report["values"] == {
        "rank": 2,
        "world_size": 3,
        "local_rank": 0,
        "local_size": 1,
        "node_rank": 1,
        "num_nodes": 2,
    }
    assert report["sources"]["rank"] == "SLURM_PROCID"
    assert report["cores"] >= 1
    assert ended.stdout.count("\n") == 1


@pytest.mark.check
def test_the_devices_are_those_of_torch_and_of_the_variables(launch: Launch) -> None:
    ended = launch([*ENV, "--json", "--devices"], env={"CUDA_VISIBLE_DEVICES": "2,3"})
    report = json.loads(ended.stdout)
    # torch for CPUs knows no devices, which says nothing about the node.
    has_gpus = bool(torch.version.cuda or torch.version.hip or torch.version.xpu)
    assert isinstance(report["devices"].pop("number"), int) == has_gpus
    assert report["devices"] == {"CUDA_VISIBLE_DEVICES": "2,3"}
    assert report["cpus"] == cpu_list(os.sched_getaffinity(0))
    lines = launch([*ENV, "--devices"], env={"ZE_AFFINITY_MASK": "0"}).stdout.splitlines()
    assert lines[-1] == "device ZE_AFFINITY_MASK: 0"


def test_the_table_contains_the_same_values(launch: Launch) -> None:
    ended = launch(ENV, env=as_recorded("srun-none", 3) | {"MASTER_PORT": "23456"})
    lines = ended.stdout.splitlines()
    assert all(line.startswith("[rank 3/4 ") for line in lines)
    rows = [line.partition("] ")[2].split() for line in lines]
    assert ["rank", "3", "SLURM_PROCID"] in rows
    assert ["world_size", "4", "SLURM_STEP_NUM_TASKS"] in rows
    assert ["MASTER_PORT", "23456", "environment"] in rows


@pytest.mark.parametrize(
    ("case", "stale"),
    [("sbatch-shell", {}), pytest.param("srun-none", {"SLURM_PROCID": "x"}, marks=pytest.mark.check)],
)
def test_a_launch_error_is_one_line_and_exit_code_2(launch: Launch, case: str, stale: dict[str, str]) -> None:
    ended = launch(ENV, env=as_recorded(case, 0) | stale)
    assert ended.exit_code == 2
    assert ended.stdout == ""
    assert ended.stderr.startswith(f"[{socket.gethostname().partition('.')[0]}] error: ")
    assert ended.stderr.count("\n") == 1


def test_discovery_imports_no_large_packages(launch: Launch) -> None:
    program = (
        "import sys, ddp_hpc.rendezvous.connect_ranks, ddp_hpc.torchrun.endpoint\n"
        "import ddp_hpc.discovery.world_report\n"
        "from ddp_hpc.discovery.world import discover\n"
        "import os; discover(dict(os.environ))\n"
        "print(sorted({'torch', 'numpy', 'h5py', 'mpi4py'} & sys.modules.keys()))\n"
    )
    ended = launch([sys.executable, "-c", program], env=as_recorded("srun-none", 0))
    assert ended.stdout == "[]\n", ended.stderr
