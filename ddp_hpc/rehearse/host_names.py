"""Makes host names that do not exist on this machine available to the processes of a rehearsal.

Some programs form the address of rank 0 themselves, from a host name and the suffix of the fast network. If
this name did not resolve, they would wait for rank 0 until their time limit. The names are added to a copy of
/etc/hosts, which replaces /etc/hosts in a new mount namespace (mount_namespaces.7), so that programs in any
language can resolve them.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from ddp_hpc.base.errors import RequestError
from ddp_hpc.rehearse.launchers.fit_to_machine import HERE
from ddp_hpc.sites.site import Site, load_site, profile_files

_HOSTS, _NSCD = Path("/etc/hosts"), Path("/run/nscd/socket")
# From sched.h and sys/mount.h.
_CLONE_NEWNS, _CLONE_NEWUSER = 0x00020000, 0x10000000
_MS_BIND, _MS_REC, _MS_PRIVATE = 1 << 12, 1 << 14, 1 << 18


def names_in_rehearsal(site: Site | None, nodes: Sequence[str]) -> list[str]:
    """Returns the names of the nodes, and the names of the nodes and of this machine on the fast networks of
    all sites.
    """
    suffixes = {site.fabric.suffix} if site else set()
    for name in profile_files():
        with suppress(RequestError):  # a profile of the user can be invalid
            suffixes.add(load_site(name).fabric.suffix)
    hosts = {os.uname().nodename, os.uname().nodename.partition(".")[0], *nodes}
    return [*nodes, *sorted(host + suffix for suffix in suffixes if suffix for host in hosts)]


def add_host_names(names: Iterable[str]) -> bool:
    """Makes this process and its descendants resolve the names to 127.0.0.1.

    Returns whether the kernel permits this: some systems allow only root to create namespaces.
    """
    with suppress(OSError):
        return _mount_hosts(names)
    return False


def _mount_hosts(names: Iterable[str]) -> bool:
    libc = ctypes.CDLL(None)
    user, group = os.geteuid(), os.getegid()
    if libc.unshare(_CLONE_NEWNS):
        # In a new user namespace, root would lose access to the files of other users.
        if user == 0 or libc.unshare(_CLONE_NEWNS | _CLONE_NEWUSER):
            return False
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    if libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None):
        return False
    if _NSCD.exists():  # this daemon would resolve names with the /etc/hosts of the whole machine
        libc.mount(b"/dev/null", bytes(_NSCD), None, _MS_BIND, None)
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", errors="surrogateescape") as file:
        with suppress(OSError):
            file.write(_HOSTS.read_text(encoding="utf-8", errors="surrogateescape"))
        file.write("".join(f"\n{HERE} {name}" for name in names) + "\n")
        file.flush()
        Path(file.name).chmod(0o644)
        return bool(libc.mount(file.name.encode(), bytes(_HOSTS), None, _MS_BIND, None) == 0)
