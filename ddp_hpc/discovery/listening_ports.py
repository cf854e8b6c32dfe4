"""Reads the TCP sockets of processes from Linux's /proc (proc(5), proc_net_tcp(5))."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_LISTEN = "0A"  # TCP_LISTEN, <net/tcp_states.h>


def sockets_of(pid: int) -> set[str]:
    """Returns the inode numbers of the sockets that this process has open."""
    inodes = set()
    with suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                kind, _, inode = str(descriptor.readlink()).partition(":")
                if kind == "socket":
                    inodes.add(inode.strip("[]"))
    return inodes


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


def listens(port: int, tables: Path) -> bool:
    """Returns whether any process listens on `port`, according to a directory such as /proc/PID/net."""
    return any(_port(fields) == port for fields in _listening(tables))


def listens_elsewhere(pid: int, inherited: set[str]) -> bool:
    """Returns whether process `pid` listens on any port.

    `inherited` contains the inode numbers of sockets of the process that do not count.
    """
    inodes = {fields[9] for fields in _listening(Path(f"/proc/{pid}/net"))} - inherited
    return bool(inodes and inodes & sockets_of(pid))


def _listening(tables: Path) -> Iterator[list[str]]:
    return (fields for fields in tcp_sockets(tables) if fields[3] == _LISTEN)


def _port(fields: list[str]) -> int:
    return int(fields[1].rpartition(":")[2], 16)
