"""Interfaces and addresses of this host, as reported by the kernel."""

import pytest

from ddp_hpc.discovery.network_interfaces import (
    all_interfaces,
    interface_address,
    interface_of,
    is_loopback,
    local_address_towards,
    outward_interfaces,
)


def test_loopback_has_its_address() -> None:
    assert interface_address("lo") == "127.0.0.1"
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("127.0.1.1") == "lo"  # Debian's second name for the host
    assert all_interfaces()["lo"] == "127.0.0.1"


@pytest.mark.parametrize("name", ["", "nosuch0", "x" * 300, "\u00fc", "lo\0x"])
def test_an_unknown_interface_has_no_address(name: str) -> None:
    assert interface_address(name) is None


def test_loopback_is_not_an_outward_interface() -> None:
    assert "lo" not in outward_interfaces()
    assert not any(address.startswith("127.") for address in outward_interfaces().values())


def test_fast_fabrics_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {
        "bond0": "10.0.0.1",
        "docker0": "172.17.0.1",
        "hsn1": "10.1.0.2",
        "hsn0": "10.1.0.1",
        "lo": "127.0.0.1",
    }
    monkeypatch.setattr("ddp_hpc.discovery.network_interfaces.all_interfaces", lambda: found)
    assert list(outward_interfaces()) == ["hsn0", "hsn1", "bond0"]


@pytest.mark.parametrize("host", ["no.such.host.invalid", "n" * 64, "n1..x", ""])
def test_a_name_that_does_not_resolve_has_no_local_address(host: str) -> None:
    assert local_address_towards(host, 1) is None
    assert not is_loopback(host)


@pytest.mark.parametrize(
    ("host", "loopback"), [("localhost", True), ("127.0.1.1", True), ("::1", True), ("10.44.0.11", False)]
)
def test_loopback_is_recognized_by_its_address(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback
