"""Finds the users at the other ends of TCP connections on this host: sock_diag(7), proc_net_tcp(5)."""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

from ddp_hpc.discovery.listening_ports import tcp_sockets

Address: TypeAlias = tuple[str, int]
Ends: TypeAlias = tuple[Address, Address]
"""The address of the peer, and that of the accepted socket."""
TABLES = Path("/proc/self/net")
_ESTABLISHED, _LISTEN = 1, 10  # <net/tcp_states.h>
# <linux/netlink.h>, <linux/sock_diag.h>
_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, _NLMSG_ERROR = 4, 20, 1, 2
_HEADER = struct.Struct("=IHHII")  # nlmsghdr: length, type, flags, sequence number, port
_REQUEST = struct.Struct("=BBBxI")  # inet_diag_req_v2: family, protocol, extensions, states
_SOCKET = struct.Struct("!HH4s12x4s12x")  # inet_diag_sockid: ports and addresses, then interface and cookie
_ANY = struct.pack("=III", 0, 0xFFFFFFFF, 0xFFFFFFFF)
_ALL_STATES = 0xFFFFFFFF
# inet_diag_msg: family, state, two more bytes, inet_diag_sockid, three numbers, the user ID.
_ANSWER = struct.Struct("=BBxx48x12xI")
_ANSWER_S = 1.0
_ENTRY_CHARS = 13  # the last characters of an entry of the tables: an IPv4 address and a port


class SocketDiagnosis:
    """Asks the kernel for the owner of one TCP socket. This takes 12 µs, however many sockets there are.

    Raises:
        OSError: the kernel does not support this, or does not find `listener`.
    """

    def __init__(self, listener: socket.socket) -> None:
        self._number = 0
        self._netlink = socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _NETLINK_SOCK_DIAG)
        try:
            self._netlink.settimeout(_ANSWER_S)
            state, _ = self._ask((listener.getsockname()[:2], ("0.0.0.0", 0)))  # noqa: S104 - any address
            if state != _LISTEN:
                raise OSError(errno.EPROTONOSUPPORT, os.strerror(errno.EPROTONOSUPPORT))
        except OSError:
            self.close()
            raise

    def user(self, ends: Ends) -> int | None:
        """Returns the user ID of the peer's process; None if the peer has closed the connection."""
        state, user = self._ask(ends)
        # A connection that its process has closed can have the user ID 0.
        return user if state == _ESTABLISHED else None

    def close(self) -> None:
        """Closes the connection to the kernel."""
        self._netlink.close()

    def _ask(self, ends: Ends) -> tuple[int, int]:
        """Returns the state and the user ID of the socket; zeros if there is no such socket."""
        (host, port), (own_host, own_port) = ends
        self._number += 1
        # The kernel finds IPv6 sockets with IPv4 addresses, too.
        request = _REQUEST.pack(socket.AF_INET, socket.IPPROTO_TCP, 0, _ALL_STATES)
        request += _SOCKET.pack(port, own_port, socket.inet_aton(host), socket.inet_aton(own_host)) + _ANY
        header = _HEADER.size + len(request), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, self._number, 0
        self._netlink.send(_HEADER.pack(*header) + request)
        number = 0
        while number != self._number:  # an answer to an earlier request may have arrived late
            answer = self._netlink.recv(4096)
            _, kind, _, number, _ = _HEADER.unpack_from(answer)
        if kind == _NLMSG_ERROR:
            (code,) = struct.unpack_from("=i", answer, _HEADER.size)
            if -code == errno.ENOENT:
                return 0, 0
            raise OSError(-code, os.strerror(-code))
        _, state, user = _ANSWER.unpack_from(answer, _HEADER.size)
        return state, user


def open_diagnosis(listener: socket.socket) -> SocketDiagnosis | None:
    """Returns the kernel's diagnosis of sockets; None if the kernel does not support it."""
    try:
        return SocketDiagnosis(listener)
    except OSError:
        return None


def users_of_peers(
    connections: Sequence[socket.socket], diagnosis: SocketDiagnosis | None, tables: Path = TABLES
) -> list[int | None]:
    """Returns the user ID of the process at the other end of each connection on this host; None if unknown.

    The connections must use IPv4. Without a diagnosis, the tables of all connections of the node are read.
    They can be long, so they are read once for all of these connections.
    """
    ends = list(map(_ends, connections))
    if diagnosis is not None:
        with suppress(OSError):
            return [pair and diagnosis.user(pair) for pair in ends]
    users = _users_in_tables({_entries(pair) for pair in ends if pair}, tables)
    return [users.get(_entries(pair)) if pair else None for pair in ends]


def _ends(connection: socket.socket) -> Ends | None:
    try:
        return connection.getpeername(), connection.getsockname()
    except OSError:  # the connection has ended
        return None


def _users_in_tables(wanted: set[str], tables: Path) -> dict[str, int]:
    """Returns the user IDs of the established connections with these entries."""
    users: dict[str, int] = {}
    # The second reading finds what the first one has missed, because the tables change while they are read.
    for _ in range(2):
        if wanted - users.keys():
            for fields in tcp_sockets(tables):
                # Clients with IPv6 sockets have addresses that end with the IPv4 address.
                entries = fields[1][-_ENTRY_CHARS:] + fields[2][-_ENTRY_CHARS:]
                if entries in wanted and int(fields[3], 16) == _ESTABLISHED:
                    users[entries] = int(fields[7])
    return users


def _entries(ends: Ends) -> str:
    return "".join(f"{struct.unpack('=I', socket.inet_aton(host))[0]:08X}:{port:04X}" for host, port in ends)
