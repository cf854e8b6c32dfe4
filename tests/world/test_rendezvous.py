"""Where the ranks meet: the choice of the address, and the way without MPI."""

import os
import socket
import time
from typing import Any

import pytest

from ddp_hpc.errors import LaunchError, RendezvousError, ReportedElsewhereError
from ddp_hpc.world import rendezvous as module
from ddp_hpc.world.interfaces import outward_interfaces
from ddp_hpc.world.rendezvous import choose_address, meeting_point, rendezvous, with_suffix
from ddp_hpc.world.topology import World, short_hostname
from ddp_hpc.world.watchdog import Watchdog

from .stand_in import mpi_world, on_all_ranks


def world(rank: int = 0, size: int = 4, local_size: int | None = None, **more: Any) -> World:
    local_size = local_size or size
    named = {"hostname": short_hostname(), "launcher": "slurm"} | more
    return World(rank=rank, world_size=size, local_rank=rank % local_size, local_size=local_size, **named)


ONE_NODE, TWO_NODES = world(), world(local_size=2)
STEP = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "n[1-2]"}


def quiet() -> Watchdog:
    return Watchdog(os.open(os.devnull, os.O_WRONLY))


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


# The address that rank 0 offers.


def test_the_users_address_comes_first() -> None:
    address = choose_address(TWO_NODES, {"MASTER_ADDR": "localhost", "DDP_HPC_FABRIC_INTERFACE": "lo"})
    assert (address.host, address.why) == ("localhost", "MASTER_ADDR")


@pytest.mark.parametrize("given", ["192.0.2.1", "no.such.host.invalid", "n" * 64, "n1..x"])
def test_an_address_that_rank_0_does_not_have_is_refused(given: str) -> None:
    with pytest.raises(
        RendezvousError, match=rf"MASTER_ADDR={given} is no address of .* rank 0 runs .*unset"
    ):
        choose_address(ONE_NODE, {"MASTER_ADDR": given})


def test_ranks_of_one_node_meet_on_loopback() -> None:
    assert choose_address(ONE_NODE, {"DDP_HPC_FABRIC_SUFFIX": ".hsn"}).host == "127.0.0.1"


def test_the_first_of_the_profiles_interfaces_that_is_here_is_taken() -> None:
    address = choose_address(TWO_NODES, {"DDP_HPC_FABRIC_INTERFACE": "nosuch0, lo"})
    assert (address.host, address.why) == ("127.0.0.1", "interface lo (DDP_HPC_FABRIC_INTERFACE)")


def test_an_interface_that_is_not_here_is_refused_with_those_that_are() -> None:
    with pytest.raises(RendezvousError, match=r"FABRIC_INTERFACE=nosuch0: .*it has .*lo 127\.0\.0\.1"):
        choose_address(TWO_NODES, {"DDP_HPC_FABRIC_INTERFACE": "nosuch0"})


def test_a_suffix_that_makes_no_name_of_this_host_is_refused() -> None:
    with pytest.raises(RendezvousError, match=r"host name and DDP_HPC_FABRIC_SUFFIX.* is no address of"):
        choose_address(TWO_NODES, {"DDP_HPC_FABRIC_SUFFIX": ".no.such.fabric.invalid"})


@pytest.mark.parametrize(
    ("host", "suffix", "name"),
    [
        ("x3001", ".hsn.site", "x3001.hsn.site"),
        ("x3001.hsn.site", ".hsn.site", "x3001.hsn.site"),  # as PBS_NODEFILE has it on some sites
        ("x3001.mgmt.site", ".hsn.site", "x3001.hsn.site"),
        ("n1", "-ib0", "n1-ib0"),
    ],
)
def test_a_suffix_is_never_put_twice(host: str, suffix: str, name: str) -> None:
    assert with_suffix(host, suffix) == name


def test_a_host_name_that_leads_to_loopback_is_no_address_for_other_nodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    if outside := outward_interfaces():
        name, host = next(iter(outside.items()))
        address = choose_address(TWO_NODES, {})
        assert (address.host, address.why) == (
            host,
            f"interface {name}, as the name localhost leads to loopback or nowhere",
        )
    monkeypatch.setattr(module, "outward_interfaces", dict)
    with pytest.raises(
        RendezvousError, match=r"no address that another node could reach \(.*set MASTER_ADDR"
    ):
        choose_address(TWO_NODES, {})


# The meeting point of ranks without MPI.


def test_one_step_meets_at_its_first_node_under_its_own_key() -> None:
    point = meeting_point(TWO_NODES, STEP)
    assert point.host == "n1"
    assert point.why == "first node of the job"
    assert len(point.ports) == 32
    assert meeting_point(TWO_NODES, STEP | {"SLURM_STEP_ID": "1"}).ports != point.ports
    assert meeting_point(TWO_NODES, STEP | {"SLURM_RESTART_COUNT": "1"}).ports != point.ports


def test_the_fabrics_suffix_goes_to_the_first_node() -> None:
    assert meeting_point(TWO_NODES, STEP | {"DDP_HPC_FABRIC_SUFFIX": "-ib0"}).host == "n1-ib0"


def test_the_users_address_and_port_are_the_meeting_point() -> None:
    point = meeting_point(TWO_NODES, STEP | {"MASTER_ADDR": "n2", "MASTER_PORT": "23456"})
    assert (point.host, point.ports) == ("n2", [23456])


def test_pals_meets_at_the_first_host_of_the_node_file(tmp_path) -> None:
    (tmp_path / "nodes").write_text("x2.hsn\nx2.hsn\nx1.hsn\n")
    pals = world(local_size=2, launcher="pals")
    point = meeting_point(pals, {"PALS_APID": "abc", "PBS_NODEFILE": str(tmp_path / "nodes")})
    assert (point.host, point.key) == ("x2.hsn", "pals-abc")


@pytest.mark.parametrize("port", ["0", "65536", "-1", "x", "", " 80", "8" * 5000])
def test_a_port_that_is_none_is_refused(port: str) -> None:
    with pytest.raises(LaunchError, match="is no port; unset it and a free one is found"):
        meeting_point(TWO_NODES, {"MASTER_ADDR": "n1", "MASTER_PORT": port})


def test_a_launcher_that_tells_no_address_is_refused_with_two_ways_out() -> None:
    with pytest.raises(LaunchError, match=r"pip install mpi4py .*or export MASTER_ADDR and MASTER_PORT"):
        meeting_point(world(local_size=2, launcher="manual"), {"RANK": "0"})


def test_a_damaged_node_list_is_refused() -> None:
    with pytest.raises(LaunchError, match="the host list"):
        meeting_point(TWO_NODES, STEP | {"SLURM_STEP_NODELIST": "n[1-"})


# The meeting itself, over loopback.


def meet(environ: dict[str, str], size: int, timeout_s: float = 10, absent: int | None = None) -> list[Any]:
    def of_rank(rank: int) -> Any:
        return None if rank == absent else rendezvous(world(rank, size), environ, timeout_s, quiet())

    return on_all_ranks(of_rank, size)


def test_ranks_of_a_plain_step_meet_without_mpi() -> None:
    endpoints = meet(STEP, 4)
    assert {(each.host, each.port) for each in endpoints} == {("127.0.0.1", endpoints[0].port)}
    assert endpoints[0].listener.getsockname()[1] == endpoints[0].port
    assert [each.listener for each in endpoints[1:]] == [None] * 3
    endpoints[0].listener.close()


def test_a_world_of_one_needs_no_meeting() -> None:
    assert rendezvous(world(size=1), {}, 1, quiet()) is None


def test_a_rank_that_does_not_come_is_named_by_rank_0_alone() -> None:
    start = time.monotonic()
    results = meet(STEP, 3, timeout_s=1, absent=2)
    assert isinstance(results[0], RendezvousError)
    assert "1 of 2 ranks did not come to rank 0" in str(results[0])
    assert "rank 2; ranks on" in str(results[0])
    assert "raise the time limit" in str(results[0])
    assert isinstance(results[1], ReportedElsewhereError)
    assert time.monotonic() - start < 5


def test_a_rank_that_cannot_reach_rank_0_names_node_address_port_interface_and_cause() -> None:
    port = closed_port()
    environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with pytest.raises(RendezvousError) as caught:
        rendezvous(world(rank=3, local_size=2), environ, 0.5, quiet())
    text = str(caught.value)
    assert f"node {short_hostname()} (rank 3) cannot reach rank 0" in text
    assert f"no answer at 127.0.0.1, port {port}, in 0.5 s: Connection refused" in text
    assert "MASTER_ADDR and MASTER_PORT; from here by interface lo" in text


def test_rank_0_on_another_node_than_the_lists_first_is_refused() -> None:
    with pytest.raises(
        RendezvousError, match=rf"to meet at n1, but rank 0 runs on {short_hostname()}; export"
    ):
        rendezvous(TWO_NODES, STEP, 1, quiet())


def test_a_node_that_cannot_reach_rank_0_is_told_by_rank_0_where_there_is_mpi(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_PROBE_S", 0.5)
    # Rank 0 offers what only itself can reach: its listener is elsewhere.
    elsewhere = closed_port()
    monkeypatch.setattr(
        module, "knock", lambda host, ports, key, number, s: KNOCK(host, [elsewhere], key, number, s)
    )
    mpis = mpi_world(2, 1)
    results = on_all_ranks(
        lambda rank: rendezvous(world(rank, 2, local_size=1, mpi=mpis[rank]), LOOPBACK, 10, quiet()), 2
    )
    text = str(results[0])
    assert isinstance(results[0], RendezvousError)
    assert results[0].everywhere
    assert f"node {short_hostname()} (rank 0) cannot reach rank 0 at 127.0.0.1:" in text
    assert "Connection refused" in text
    assert "(MASTER_ADDR); 2 node(s) cannot; name the right network in DDP_HPC_FABRIC_INTERFACE" in text
    assert isinstance(results[1], ReportedElsewhereError)


KNOCK, LOOPBACK = module.knock, {"MASTER_ADDR": "127.0.0.1"}


# Under torchrun, whose agent keeps the store.

AGENT = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1"}


def test_the_agents_store_is_only_proved_to_be_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as agent:
        port = agent.getsockname()[1]
        endpoint = rendezvous(world(launcher="torchrun"), AGENT | {"MASTER_PORT": str(port)}, 5, quiet())
    assert endpoint is not None
    assert (endpoint.port, endpoint.agent_hosts_it, endpoint.listener) == (port, True, None)


def test_an_agents_store_that_cannot_be_reached_is_named() -> None:
    port = closed_port()
    with pytest.raises(RendezvousError, match=rf"torchrun's store at 127\.0\.0\.1:{port}; .*refused"):
        rendezvous(world(launcher="torchrun"), AGENT | {"MASTER_PORT": str(port)}, 2, quiet())


@pytest.mark.parametrize("name", ["MASTER_ADDR", "MASTER_PORT"])
def test_a_missing_address_of_the_agent_is_named(name: str) -> None:
    environ = {k: v for k, v in (AGENT | {"MASTER_PORT": "1"}).items() if k != name}
    with pytest.raises(LaunchError, match=name):
        rendezvous(world(launcher="torchrun"), environ, 2, quiet())
