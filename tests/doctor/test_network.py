"""Check of the network interfaces."""

import pytest

from ddp_hpc.doctor import network
from ddp_hpc.doctor.check_result import Here


@pytest.fixture
def cray(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node with Slingshot."""
    found = {"lo": "127.0.0.1", "hsn0": "10.1.0.1", "hsn1": "10.1.0.2", "bond0": "10.0.0.1"}
    monkeypatch.setattr("ddp_hpc.discovery.network_interfaces.all_interfaces", lambda: found)
    monkeypatch.setattr(network, "all_interfaces", lambda: found)
    monkeypatch.setattr(network, "interface_address", found.get)


@pytest.mark.usefixtures("cray")
def test_interfaces_that_lead_to_other_nodes_are_listed() -> None:
    found = network.interfaces(Here({}))
    assert found.what == "hsn0 10.1.0.1, hsn1 10.1.0.2, bond0 10.0.0.1"


@pytest.mark.usefixtures("cray")
@pytest.mark.parametrize(
    ("variable", "value", "status"),
    [
        ("NCCL_SOCKET_IFNAME", "hsn", "ok"),  # a prefix
        ("NCCL_SOCKET_IFNAME", "=hsn", "fail"),  # the whole name
        ("NCCL_SOCKET_IFNAME", "=hsn0", "ok"),
        ("NCCL_SOCKET_IFNAME", "^docker0", "ok"),  # all but
        ("NCCL_SOCKET_IFNAME", "ib0,ib1", "fail"),
        ("GLOO_SOCKET_IFNAME", "hsn", "fail"),  # gloo accepts no prefix
        ("GLOO_SOCKET_IFNAME", "hsn0,hsn1", "ok"),
        ("DDP_HPC_FABRIC_INTERFACE", "ib0,hsn0", "ok"),  # the first one that exists is used
        ("DDP_HPC_FABRIC_INTERFACE", ",", "fail"),
    ],
)
def test_interfaces_that_the_environment_names(variable: str, value: str, status: str) -> None:
    found = network.interfaces(Here({variable: value}))
    assert found.status == status
    if status == "fail":
        assert found.what.startswith(f"{variable}={value}, but this host has the interfaces bond0, hsn0")


@pytest.mark.parametrize(("num_nodes", "status"), [(1, "warn"), (2, "fail")])
def test_loopback_alone(num_nodes: int, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "outward_interfaces", dict)
    assert network.interfaces(Here({}, num_nodes=num_nodes)).status == status
