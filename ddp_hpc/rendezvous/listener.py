"""Listening sockets, and the ports on which ranks without MPI look for rank 0."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import socket
from collections.abc import Sequence

from ddp_hpc.base.errors import RendezvousError
from ddp_hpc.discovery.network_interfaces import resolve
from ddp_hpc.discovery.open_files import raise_file_limit

# These ports are below Linux's ephemeral range (32768 to 60999), from which the kernel assigns ports.
_FIRST_PORT, _NUM_PORTS, _NUM_CANDIDATES = 20000, 12000, 32
_BACKLOG = 16384  # the kernel uses net.core.somaxconn if that is less
_OTHER_FILES = 100  # open files of rank 0 and of the store besides connections from ranks


def candidate_ports(launch: str) -> list[int]:
    """Returns the ports that all ranks of one launch try, in the same order. A port in use is skipped."""
    digest = hashlib.sha256(launch.encode()).digest()
    start, step = int.from_bytes(digest[:4], "big"), int.from_bytes(digest[4:6], "big") * 2 + 1
    return [_FIRST_PORT + (start + i * step) % _NUM_PORTS for i in range(_NUM_CANDIDATES)]


def open_listener(ports: Sequence[int], address: str = "", num_connections: int = 0) -> socket.socket:
    """Returns a listening socket on the first free port of the list; for port 0 the kernel chooses one.

    `address` is an address or name of this host; empty means all its addresses, IPv4 and IPv6. The limit on
    open files of this process is raised to its maximum, because rank 0 may have a connection to every rank.
    `num_connections` is the number of connections to expect.

    Raises:
        RendezvousError: no port is free, the address does not belong to this host, or the limit on open files
            is too low.
    """
    limit = raise_file_limit()
    if num_connections + _OTHER_FILES > limit:
        raise RendezvousError(
            f"rank 0 needs {num_connections + _OTHER_FILES} open files for {num_connections} connections "
            f"from ranks, but the hard limit on {socket.gethostname()} is {limit} (ulimit -Hn); "
            "ask the site to raise it, or use fewer ranks"
        )
    for port in ports:
        try:
            return _listen(address, port)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                where = f"port {port} of {address or socket.gethostname()}"
                raise RendezvousError(
                    f"cannot listen on {where}; check MASTER_ADDR and MASTER_PORT"
                ) from error
    if len(ports) == 1:
        raise RendezvousError(
            f"port {ports[0]} of {socket.gethostname()} is used by another program; unset MASTER_PORT to use "
            "a free port"
        )
    raise RendezvousError(
        f"all ports that were tried on {socket.gethostname()} are in use ({ports[0]}, {ports[1]}, ...); "
        "check for processes of earlier jobs"
    )


def reserve_port() -> socket.socket:
    """Returns a socket that reserves a free port for torch's TCPStore.

    TCPStore sets SO_REUSEADDR, so it can listen on the port too. The kernel does not assign the port to other
    programs.
    """
    for family in (socket.AF_INET6, socket.AF_INET):
        with contextlib.suppress(OSError):  # the host may lack IPv6
            reserved = socket.socket(family)
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            reserved.bind(("", 0))
            return reserved
    raise RendezvousError(f"{socket.gethostname()} has no free port; check that its network is up")


def _listen(address: str, port: int) -> socket.socket:
    if address:
        family, target = next(
            ((info[0], info[4]) for info in resolve(address, port, socket.AF_UNSPEC, socket.SOCK_STREAM)),
            (socket.AF_INET, (address, port)),
        )
        return socket.create_server(target, family=family, backlog=_BACKLOG)
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(
            OSError
        ):  # in some containers the kernel supports IPv6, but no IPv6 address exists
            return socket.create_server(
                ("", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True
            )
    return socket.create_server(("", port), backlog=_BACKLOG)
