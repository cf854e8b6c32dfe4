"""Reads the TCP sockets of processes from Linux's /proc (proc(5), proc_net_tcp(5))."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_LISTEN = "0A"  # TCP_LISTEN, <net/tcp_states.h>


def sockets_of(pid: int) -> set[str]:
    """Returns the inode numbers of the sockets that this process has open."""
    found = set()
    with suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                kind, _, inode = str(descriptor.readlink()).partition(":")
                if kind == "socket":
                    found.add(inode.strip("[]"))
    return found


def tcp_sockets(tables: Path) -> Iterator[list[str]]:
    """Yields the fields of each TCP socket in a directory such as /proc/PID/net.

    Without IPv6, the directory contains only the table for IPv4.
    """
    for name in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in (tables / name).read_text("ascii", "replace").splitlines()[1:]:
                fields = line.split()
                if len(fields) > 9:
                    yield fields


def listens(pid: int, port: int, inherited: set[str]) -> bool:
    """Returns whether any process listens on `port`, or process `pid` listens on any other port.

    `inherited` contains the inode numbers of sockets of the process that do not count.
    """
    inodes = set()
    for fields in tcp_sockets(Path(f"/proc/{pid}/net")):
        if fields[3] == _LISTEN:
            if int(fields[1].rpartition(":")[2], 16) == port:
                return True
            inodes.add(fields[9])
    inodes -= inherited
    return bool(inodes and inodes & sockets_of(pid))
