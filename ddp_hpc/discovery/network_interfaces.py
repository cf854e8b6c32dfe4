"""The network interfaces and addresses of this host. Linux only."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

_SIOCGIFADDR = 0x8915  # <linux/sockios.h>
# Bridges and tunnels of containers and virtual machines do not lead to other nodes.
_VIRTUAL = ("docker", "virbr", "br-", "cni", "cali", "flannel", "tun", "tap", "podman", "veth")


class Interface(NamedTuple):
    """A network interface of this host and its IPv4 address."""

    name: str
    address: str


def interface_address(name: str) -> str | None:
    """Returns the IPv4 address of an interface; None if the interface or its address does not exist."""
    if len(name.encode()) > 15 or "\0" in name:  # the kernel would truncate the name
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def all_interfaces() -> dict[str, str]:
    """Returns the names and addresses of all interfaces that have an IPv4 address."""
    addresses = {name: interface_address(name) for _, name in socket.if_nameindex()}
    return {name: address for name, address in addresses.items() if address is not None}


def outward_interfaces() -> dict[str, str]:
    """Returns the interfaces that can lead to another node, fast fabrics (hsn*, ib*) first."""
    outward = {
        name: address
        for name, address in all_interfaces().items()
        # 169.254/16 is excluded, because it is usually the link to the board's own management controller.
        if not name.startswith(_VIRTUAL) and not address.startswith(("127.", "169.254."))
    }
    return dict(sorted(outward.items(), key=lambda item: (not item[0].startswith(("hsn", "ib")), item[0])))


def interface_of(address: str) -> str | None:
    """Returns the interface that has this address; None if no interface of this host has it."""
    default = "lo" if address.startswith("127.") else None
    return next((name for name, own in all_interfaces().items() if own == address), default)


def fabric_interface(environ: Mapping[str, str]) -> Interface | None:
    """Returns the first interface in DDP_HPC_FABRIC_INTERFACE that exists, or None."""
    for name in environ.get("DDP_HPC_FABRIC_INTERFACE", "").split(","):
        if name.strip() and (address := interface_address(name.strip())):
            return Interface(name.strip(), address)
    return None


def local_address_towards(host: str, port: int) -> str | None:
    """Returns the local address that this host uses to connect to `host`; None if there is no route.

    Connecting a UDP socket sends nothing, but makes the kernel choose the route.
    """
    for family, kind, protocol, _, target in resolve(host, port, socket.AF_INET, socket.SOCK_DGRAM):
        with socket.socket(family, kind, protocol) as probe, contextlib.suppress(OSError):
            probe.connect(target)
            return str(probe.getsockname()[0])
    return None


def is_own_address(host: str) -> bool:
    """Returns whether this host can bind a socket to this name or address."""
    for family, kind, protocol, _, target in resolve(host, 0, socket.AF_UNSPEC, socket.SOCK_STREAM):
        with socket.socket(family, kind, protocol) as probe, contextlib.suppress(OSError):
            probe.bind(target)
            return True
    return False


def is_loopback(host: str) -> bool:
    """Returns whether a name or address resolves to loopback, as with Debian's `127.0.1.1 NAME`."""
    addresses = [str(info[4][0]) for info in resolve(host, 0, socket.AF_UNSPEC, socket.SOCK_STREAM)]
    return bool(addresses) and all(a.startswith("127.") or a == "::1" for a in addresses)


def resolve(host: str, port: int, family: int, kind: int) -> list[Any]:
    """Returns the result of getaddrinfo, or an empty list if the name does not resolve."""
    try:
        return socket.getaddrinfo(host, port, family, kind)
    except (OSError, UnicodeError):  # UnicodeError: a label has more than 63 letters
        return []
