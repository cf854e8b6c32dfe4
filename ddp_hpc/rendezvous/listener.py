"""Listening sockets, and the ports at which ranks that cannot send messages yet look for rank 0."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import resource
import socket
from collections.abc import Sequence

from ddp_hpc.discovery.network_interfaces import resolve
from ddp_hpc.errors import RendezvousError

# Below Linux's ephemeral range (32768 to 60999), from which any program is given ports.
_FIRST_PORT, _NUM_PORTS, _NUM_CANDIDATES = 20000, 12000, 32
_BACKLOG = 4096


def candidate_ports(launch: str) -> list[int]:
    """The ports that all ranks of one launch try, in one order. A taken one is passed over, never shared."""
    digest = hashlib.sha256(launch.encode()).digest()
    start, step = int.from_bytes(digest[:4], "big"), int.from_bytes(digest[4:6], "big") * 2 + 1
    return [_FIRST_PORT + (start + i * step) % _NUM_PORTS for i in range(_NUM_CANDIDATES)]


def open_listener(ports: Sequence[int], address: str = "") -> socket.socket:
    """A listening socket on the first port of the list that is free; 0 lets the kernel choose.

    `address` is one of this host's, or a name of one; empty: all of them, IPv4 and IPv6. Raises this
    process's limit of open files as far as it may: rank 0 holds connections of every rank.

    Raises:
        RendezvousError: none is free, or the address is not this host's.
    """
    _raise_file_limit()
    for port in ports:
        try:
            return _listen(address, port)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                where = f"port {port} of {address or socket.gethostname()}"
                raise RendezvousError(f"cannot listen on {where}") from error
    if len(ports) == 1:
        raise RendezvousError(
            f"port {ports[0]} of {socket.gethostname()} is taken by another program; unset MASTER_PORT and a "
            "free one is found"
        )
    raise RendezvousError(f"none of the ports {ports[0]}, {ports[1]}, ... is free on {socket.gethostname()}")


def _listen(address: str, port: int) -> socket.socket:
    if address:
        family, target = next(
            ((found[0], found[4]) for found in resolve(address, port, socket.AF_UNSPEC, socket.SOCK_STREAM)),
            (socket.AF_INET, (address, port)),
        )
        return socket.create_server(target, family=family, backlog=_BACKLOG)
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # an image without IPv6 has the module, not the address
            return socket.create_server(
                ("", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True
            )
    return socket.create_server(("", port), backlog=_BACKLOG)


def _raise_file_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
