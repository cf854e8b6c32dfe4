"""Checks of the network interfaces and of the hostname."""

from __future__ import annotations

import socket

from ddp_hpc.discovery.network_interfaces import (
    all_interfaces,
    interface_address,
    is_loopback,
    outward_interfaces,
)
from ddp_hpc.doctor.check_result import DoctorFinding, Here, fail, first_line, ok, warn


def interfaces(here: Here) -> DoctorFinding:
    """Checks for network interfaces that lead to other nodes or that environment variables name."""
    own = sorted(all_interfaces())
    for variable in ("DDP_HPC_FABRIC_INTERFACE", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        text = here.environ.get(variable, "")
        if text and not _names_one(variable, text, own):
            return fail(
                f"{variable}={text[:80]}, but this host has the interfaces {', '.join(own)}",
                f"set it to one of them, or unset {variable}",
            )
    outward = outward_interfaces()
    if outward:
        return ok(", ".join(f"{name} {address}" for name, address in outward.items()), ", ".join(outward))
    what = f"no interface leads to other nodes (found {', '.join(own)})"
    if here.num_nodes > 1:
        return fail(what, "ask the site why this node has no network interface for jobs")
    return warn(what, "only jobs on one node will work")


def _names_one(variable: str, text: str, own: list[str]) -> bool:
    """Returns whether the value of one of these variables matches a network interface of this host.

    NCCL_SOCKET_IFNAME lists prefixes of names, or after `=` exact names, or after `^` excluded prefixes.
    """
    names = [name.strip() for name in text.lstrip("^=").split(",") if name.strip()]
    if text.startswith("^"):
        return True
    if variable == "NCCL_SOCKET_IFNAME" and not text.startswith("="):
        return any(interface.startswith(tuple(names)) for interface in own)
    return any(interface_address(name) for name in names)


def hostname(_here: Here) -> DoctorFinding:
    """Checks the address of this host's name; other nodes cannot use Debian's default, 127.0.1.1."""
    return name_resolution(socket.gethostname())


def name_resolution(name: str) -> DoctorFinding:
    """Checks the address of a hostname. It never fails, since ddp-hpc uses the addresses of interfaces."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        return warn(
            f"{name} does not resolve ({first_line(error)})",
            "add the host to /etc/hosts or DNS; until then export GLOO_SOCKET_IFNAME=INTERFACE",
            "does not resolve",
        )
    addresses = ", ".join(dict.fromkeys(str(info[4][0]) for info in found))
    if is_loopback(name):
        return warn(
            f"hostname {name} resolves to {addresses} (loopback): other nodes cannot use it as MASTER_ADDR",
            "use the address of an interface as ddp-hpc does, and export GLOO_SOCKET_IFNAME=INTERFACE "
            "for other programs",
            "loopback",
        )
    return ok(f"{name} resolves to {addresses}", "resolves")
