"""Detects whether a process listens on a TCP port, from Linux's /proc (proc(5), proc_net(5))."""

from __future__ import annotations

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


def listens(pid: int, port: int, inherited: set[str]) -> bool:
    """Returns whether any process listens on `port`, or process `pid` listens on any other port.

    `inherited` contains the inode numbers of sockets of the process that do not count.
    """
    inodes = set()
    for name in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/net/{name}").read_text("ascii", "replace").splitlines()[1:]:
                fields = line.split()
                if len(fields) > 9 and fields[3] == _LISTEN:
                    if int(fields[1].rpartition(":")[2], 16) == port:
                        return True
                    inodes.add(fields[9])
    inodes -= inherited
    return bool(inodes and inodes & sockets_of(pid))
