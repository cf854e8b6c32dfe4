"""Check of the network interfaces."""

from __future__ import annotations

from ddp_hpc.discovery.network_interfaces import (
    all_interfaces,
    interface_address,
    outward_interfaces,
)
from ddp_hpc.doctor.check_result import Here, Result, fail, ok, warn


def interfaces(here: Here) -> Result:
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
        return ok(", ".join(f"{name} {address}" for name, address in outward.items()))
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
