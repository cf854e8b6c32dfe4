"""Which network interfaces this host has, and which of them leads to an address. Linux."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
from collections.abc import Mapping
from typing import Any

_SIOCGIFADDR = 0x8915  # <linux/sockios.h>
# Bridges and tunnels of containers and virtual machines lead to no other node.
_VIRTUAL = ("docker", "virbr", "br-", "cni", "cali", "flannel", "tun", "tap", "podman", "veth")


def interface_address(name: str) -> str | None:
    """The IPv4 address of an interface; None where there is no such interface or it has none."""
    if len(name.encode()) > 15 or "\0" in name:  # the kernel would look at the beginning alone
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def all_interfaces() -> dict[str, str]:
    """Interface names and their IPv4 addresses, those without one left out."""
    found = {name: interface_address(name) for _, name in socket.if_nameindex()}
    return {name: address for name, address in found.items() if address is not None}


def outward_interfaces() -> dict[str, str]:
    """The interfaces that can lead to another node, fast fabrics (hsn*, ib*) first."""
    found = {
        name: address
        for name, address in all_interfaces().items()
        # 169.254/16 is the link to the board's own management controller, more often than not.
        if not name.startswith(_VIRTUAL) and not address.startswith(("127.", "169.254."))
    }
    return dict(sorted(found.items(), key=lambda item: (not item[0].startswith(("hsn", "ib")), item[0])))


def interface_of(address: str) -> str | None:
    """The interface that carries an address of this host; None where none does."""
    for name, own in all_interfaces().items():
        if own == address:
            return name
    return "lo" if address.startswith("127.") else None


def fabric_interface(environ: Mapping[str, str]) -> tuple[str, str] | None:
    """Name and address of the first interface in DDP_HPC_FABRIC_INTERFACE that this host has, or None."""
    for name in environ.get("DDP_HPC_FABRIC_INTERFACE", "").split(","):
        if name.strip() and (address := interface_address(name.strip())):
            return name.strip(), address
    return None


def local_address_towards(host: str, port: int) -> str | None:
    """The address from which this host would reach another one; None where it has no way there.

    A UDP socket that is connected sends nothing, yet the kernel picks the route.
    """
    for family, kind, protocol, _, target in resolve(host, port, socket.AF_INET, socket.SOCK_DGRAM):
        with socket.socket(family, kind, protocol) as probe, contextlib.suppress(OSError):
            probe.connect(target)
            return str(probe.getsockname()[0])
    return None


def is_own_address(host: str) -> bool:
    """True where a socket of this host can carry this name or address."""
    for family, kind, protocol, _, target in resolve(host, 0, socket.AF_UNSPEC, socket.SOCK_STREAM):
        with socket.socket(family, kind, protocol) as probe, contextlib.suppress(OSError):
            probe.bind(target)
            return True
    return False


def is_loopback(host: str) -> bool:
    """True where a name or address leads to this host's loopback, as Debian's `127.0.1.1 NAME` does."""
    addresses = [str(info[4][0]) for info in resolve(host, 0, socket.AF_UNSPEC, socket.SOCK_STREAM)]
    return bool(addresses) and all(a.startswith("127.") or a == "::1" for a in addresses)


def resolve(host: str, port: int, family: int, kind: int) -> list[Any]:
    """What getaddrinfo knows of a name; nothing where it does not resolve."""
    try:
        return socket.getaddrinfo(host, port, family, kind)
    except (OSError, UnicodeError):  # the second for a label of more than 63 letters
        return []
