"""The rendezvous: the choice of the address, and the connection without MPI."""

import os
import re
import socket
import time
from typing import Any

import pytest

from ddp_hpc.base.errors import LaunchError, RendezvousError, ReportedElsewhereError
from ddp_hpc.discovery.network_interfaces import outward_interfaces
from ddp_hpc.discovery.watchdog import Watchdog
from ddp_hpc.discovery.world import World, short_hostname
from ddp_hpc.rendezvous import address as module
from ddp_hpc.rendezvous import connect_ranks as rendezvous_module
from ddp_hpc.rendezvous.address import RendezvousPoint, choose_address, rendezvous_point, with_suffix
from ddp_hpc.rendezvous.connect_ranks import Endpoint, Joining, rendezvous
from tests.discovery.simulated_mpi import mpi_world, on_all_ranks
from tests.stores import closed_port


def world(rank: int = 0, size: int = 4, local_size: int | None = None, **more: Any) -> World:
    local_size = local_size or size
    named = {"hostname": short_hostname(), "launcher": "slurm"} | more
    return World(rank=rank, world_size=size, local_rank=rank % local_size, local_size=local_size, **named)


ONE_NODE, TWO_NODES = world(), world(local_size=2)
STEP = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "n[1-2]"}


def quiet() -> Watchdog:
    return Watchdog(os.open(os.devnull, os.O_WRONLY))


# The address that rank 0 offers.


def test_master_addr_has_precedence() -> None:
    address = choose_address(TWO_NODES, {"MASTER_ADDR": "localhost", "DDP_HPC_FABRIC_INTERFACE": "lo"})
    assert (address.host, address.why) == ("localhost", "MASTER_ADDR")


@pytest.mark.parametrize("given", ["192.0.2.1", "n" * 64])
def test_a_master_addr_that_rank_0_does_not_have_is_refused(given: str) -> None:
    with pytest.raises(
        RendezvousError, match=rf"MASTER_ADDR={given} is not an address of .* rank 0 runs; unset it"
    ):
        choose_address(ONE_NODE, {"MASTER_ADDR": given})


def test_ranks_of_one_node_use_loopback() -> None:
    assert choose_address(ONE_NODE, {"DDP_HPC_FABRIC_SUFFIX": ".hsn"}).host == "127.0.0.1"


def test_the_first_existing_interface_of_the_profile_is_used() -> None:
    address = choose_address(TWO_NODES, {"DDP_HPC_FABRIC_INTERFACE": "nosuch0, lo"})
    assert (address.host, address.why) == ("127.0.0.1", "interface lo (DDP_HPC_FABRIC_INTERFACE)")


def test_a_missing_interface_is_refused_with_the_existing_ones() -> None:
    with pytest.raises(RendezvousError, match=r"FABRIC_INTERFACE=nosuch0: .*interfaces: .*lo 127\.0\.0\.1"):
        choose_address(TWO_NODES, {"DDP_HPC_FABRIC_INTERFACE": "nosuch0"})


def test_a_suffix_that_gives_no_name_of_this_host_is_refused() -> None:
    with pytest.raises(RendezvousError, match=r"host name and DDP_HPC_FABRIC_SUFFIX.* is not an address of"):
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
def test_a_suffix_is_never_appended_twice(host: str, suffix: str, name: str) -> None:
    assert with_suffix(host, suffix) == name


def test_a_host_name_that_resolves_to_loopback_is_not_offered_to_other_nodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    if outside := outward_interfaces():
        name, host = next(iter(outside.items()))
        address = choose_address(TWO_NODES, {})
        assert (address.host, address.why) == (
            host,
            f"interface {name}, because the name localhost does not resolve, or resolves to loopback",
        )
    monkeypatch.setattr(module, "outward_interfaces", dict)
    with pytest.raises(RendezvousError, match=r"no address that other nodes can reach \(.*set MASTER_ADDR"):
        choose_address(TWO_NODES, {})


# The rendezvous point of ranks without MPI.


def test_the_rendezvous_point_of_a_step_is_its_first_node() -> None:
    point = rendezvous_point(TWO_NODES, STEP)
    assert point.host == "n1"
    assert point.why == "first node of the job"
    assert len(point.ports) == 32
    assert rendezvous_point(TWO_NODES, STEP | {"SLURM_STEP_ID": "1"}).ports != point.ports
    assert rendezvous_point(TWO_NODES, STEP | {"SLURM_RESTART_COUNT": "1"}).ports != point.ports


def test_the_rendezvous_point_of_pals_is_the_first_host_of_the_node_file(tmp_path) -> None:
    (tmp_path / "nodes").write_text("x2.hsn\nx2.hsn\nx1.hsn\n")
    pals = world(local_size=2, launcher="pals")
    point = rendezvous_point(pals, {"PALS_APID": "abc", "PBS_NODEFILE": str(tmp_path / "nodes")})
    assert (point.host, point.launch) == ("x2.hsn", "pals-abc")


@pytest.mark.parametrize("port", ["0", "65536", "x", "", "8" * 5000])
def test_an_invalid_master_port_is_refused(port: str) -> None:
    with pytest.raises(LaunchError, match="is not a port number; unset it to use a free port"):
        rendezvous_point(TWO_NODES, {"MASTER_ADDR": "n1", "MASTER_PORT": port})


def test_a_launcher_without_an_address_is_refused_with_two_solutions() -> None:
    with pytest.raises(LaunchError, match=r"pip install mpi4py .*or export MASTER_ADDR and MASTER_PORT"):
        rendezvous_point(world(local_size=2, launcher="manual"), {"RANK": "0"})


# The address to listen on is as restricted as possible.


@pytest.mark.parametrize(
    ("environ", "place", "listen"),
    [
        ({}, ONE_NODE, "127.0.0.1"),
        ({"MASTER_ADDR": "localhost"}, ONE_NODE, "localhost"),
        ({"MASTER_ADDR": "127.0.0.1"}, TWO_NODES, "127.0.0.1"),
        ({"DDP_HPC_FABRIC_INTERFACE": "lo"}, TWO_NODES, "127.0.0.1"),
        # The other nodes may resolve a name to another address of rank 0.
        ({"MASTER_ADDR": "localhost"}, TWO_NODES, ""),
    ],
)
def test_rank_0_listens_on_the_address_that_it_offers(
    environ: dict[str, str], place: World, listen: str
) -> None:
    assert choose_address(place, environ).listen == listen


# The rendezvous itself, over loopback.


@pytest.fixture(autouse=True)
def keys(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    for environ in (STEP, LOOPBACK, AGENT):
        monkeypatch.setitem(environ, "DDP_HPC_KEY_DIR", str(tmp_path))


def meet(environ: dict[str, str], size: int, timeout_s: float = 10, absent: int | None = None) -> list[Any]:
    def of_rank(rank: int) -> Any:
        return None if rank == absent else rendezvous(world(rank, size), environ, timeout_s, quiet())

    return on_all_ranks(of_rank, size)


def close_all(endpoints: list[Endpoint]) -> None:
    for endpoint in reversed(endpoints):
        endpoint.close()


def test_ranks_of_a_slurm_step_connect_without_mpi() -> None:
    endpoints = meet(STEP, 4)
    assert {(each.host, each.port) for each in endpoints} == {("127.0.0.1", endpoints[0].port)}
    assert [each.process is None for each in endpoints] == [False, True, True, True]
    assert {each.note for each in endpoints} == {""}
    endpoints[3].store.set("a", b"b", 5)
    assert endpoints[1].store.get(["a"], 5) == [b"b"]
    close_all(endpoints)


def test_a_missing_rank_is_reported_by_rank_0_only() -> None:
    start = time.monotonic()
    results = meet(STEP, 3, timeout_s=1, absent=2)
    assert isinstance(results[0], RendezvousError)
    assert "1 of 2 ranks did not connect to rank 0" in str(results[0])
    assert "rank 2; ranks on" in str(results[0])
    assert "increase the time limit" in str(results[0])
    assert isinstance(results[1], ReportedElsewhereError)
    assert time.monotonic() - start < 8


def test_a_rank_that_cannot_reach_rank_0_reports_node_address_port_interface_and_cause() -> None:
    port = closed_port()
    environ = LOOPBACK | {"MASTER_PORT": str(port)}
    with pytest.raises(RendezvousError) as caught:
        rendezvous(world(rank=3, local_size=2), environ, 0.5, quiet())
    text = str(caught.value)
    assert f"node {short_hostname()} (rank 3) cannot reach rank 0" in text
    assert f"no answer from 127.0.0.1, port {port}, within 0.5 s: Connection refused" in text
    assert "MASTER_ADDR and MASTER_PORT; local interface: lo" in text


def test_rank_0_on_another_node_than_the_first_is_refused() -> None:
    with pytest.raises(
        RendezvousError,
        match=rf"try to connect to rank 0 at n1, but rank 0 runs on {short_hostname()}; export",
    ):
        rendezvous(TWO_NODES, STEP, 1, quiet())


def test_with_mpi_rank_0_reports_a_rank_that_cannot_reach_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rendezvous_module, "_CONNECT_S", 0.5)
    # Simulates an address that is not reachable: the ranks connect to a closed port instead.
    elsewhere, connect = closed_port(), rendezvous_module.connect
    monkeypatch.setattr(
        rendezvous_module, "connect", lambda host, ports, key, s: connect(host, [elsewhere], key, s)
    )
    mpis = mpi_world(2, 1)
    results = on_all_ranks(
        lambda rank: rendezvous(world(rank, 2, local_size=1, mpi=mpis[rank]), LOOPBACK, 10, quiet()), 2
    )
    text = str(results[0])
    assert isinstance(results[0], RendezvousError)
    assert results[0].on_all_ranks
    assert f"node {short_hostname()} (rank 0) cannot reach rank 0 at 127.0.0.1:" in text
    assert "Connection refused" in text
    assert "(MASTER_ADDR); 2 of 2 ranks are affected; set DDP_HPC_FABRIC_INTERFACE" in text
    assert isinstance(results[1], ReportedElsewhereError)


def test_the_other_ranks_stop_waiting_if_rank_0_dies() -> None:
    def of_rank(rank: int) -> Any:
        if rank == 1:
            return rendezvous(world(1, 3), STEP, 20, quiet())
        if rank == 0:
            point = rendezvous_point(world(0, 3), STEP)
            key, _ = rendezvous_module.shared_secret(STEP, point.launch)
            process, store = rendezvous_module.serve_store(point, key, short_hostname())
            while not store.given("rendezvous", 10):
                time.sleep(0.01)
            process._process.kill()
            store.close()
        return None

    started = time.monotonic()
    results = on_all_ranks(of_rank, 2)
    assert re.search(r"node \S+ \(rank 1\): rank 0 at 127.0.0.1:\d+ has ended", str(results[1]))
    assert time.monotonic() - started < 10


# Under torchrun.

LOOPBACK = {"MASTER_ADDR": "127.0.0.1"}
AGENT = {
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RUN_ID": str(os.getpid()),
    "MASTER_ADDR": "127.0.0.1",
}


def test_ranks_under_torchrun_have_a_store_beside_the_agents() -> None:
    with socket.create_server(("127.0.0.1", 0)) as agent:
        environ = AGENT | {"MASTER_PORT": str(agent.getsockname()[1])}
        endpoints = on_all_ranks(
            lambda rank: rendezvous(world(rank, 3, launcher="torchrun"), environ, 10, quiet()), 3
        )
        assert endpoints[0].port != agent.getsockname()[1]
        assert endpoints[0].why == "torchrun's agent"
    close_all(endpoints)


def test_the_store_of_an_earlier_attempt_is_skipped() -> None:
    """Rank 0 of the earlier attempt still serves its port, but all rank numbers are in use there."""
    environ = AGENT | {"MASTER_PORT": "1"}

    def attempt() -> list[Endpoint]:
        return on_all_ranks(
            lambda rank: rendezvous(world(rank, 3, launcher="torchrun"), environ, 10, quiet()), 3
        )

    before = attempt()
    after = attempt()
    assert after[0].port != before[0].port
    assert {each.port for each in after} == {after[0].port}
    close_all(before)
    close_all(after)


def test_a_rank_number_already_in_use_is_an_error_after_the_time_limit() -> None:
    endpoints = meet(STEP, 2)
    point = rendezvous_point(world(1, 2), STEP)
    key, _ = rendezvous_module.shared_secret(STEP, point.launch)
    taken = RendezvousPoint(point.host, [endpoints[0].port], "", "")
    with pytest.raises(RendezvousError, match="another process has already joined as rank"):
        Joining(taken, lambda: key, 1, "rank 1").connect(1.0)
    close_all(endpoints)


@pytest.mark.check
def test_a_rank_of_a_launch_with_another_number_of_ranks_does_not_join() -> None:
    """Two launches by hand with the same MASTER_PORT."""
    environ = LOOPBACK | {"MASTER_PORT": str(closed_port())}
    worlds = [world(0, 2), world(1, 2), world(1, 3)]

    def of_rank(number: int) -> Any:
        time.sleep(1.0 if number == 1 else 0.0)  # the rank of the other launch is faster
        return rendezvous(worlds[number], environ, 4, quiet())

    *endpoints, other = on_all_ranks(of_rank, 3)
    assert isinstance(other, RendezvousError)
    assert "the store on this port belongs to another job" in str(other)
    close_all(endpoints)
