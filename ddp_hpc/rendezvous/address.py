"""Chooses the address on which rank 0 listens, and determines how other ranks find it without MPI."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass

from ddp_hpc.base.errors import LaunchError, RendezvousError
from ddp_hpc.base.hostlist import expand_hostlist
from ddp_hpc.base.job_variables import JOB_VARIABLES, node_file_hosts
from ddp_hpc.base.option_names import named
from ddp_hpc.discovery.launcher_environment import Environ
from ddp_hpc.discovery.network_interfaces import (
    Interface,
    all_interfaces,
    fabric_interface,
    is_loopback,
    is_own_address,
    outward_interfaces,
)
from ddp_hpc.discovery.world import World
from ddp_hpc.rendezvous.listener import candidate_ports

LOOPBACK = "127.0.0.1"
LAUNCH_ID = "DDP_HPC_LAUNCH"
"""This variable contains a unique ID of the launch, for launchers that do not set one themselves."""


@dataclass(frozen=True)
class Address:
    """Rank 0's host name or address for the other ranks, and the reason for this choice."""

    host: str
    why: str
    listen: str = ""
    """The address to listen on. Empty: all addresses, because other hosts may resolve `host` differently."""


@dataclass(frozen=True)
class RendezvousPoint:
    """The host and the ports, tried in order, at which ranks without MPI look for rank 0."""

    host: str
    ports: list[int]
    launch: str  # the ID of this launch; not secret
    why: str
    listen: str = ""


def choose_address(world: World, environ: Environ) -> Address:
    """Returns the address that rank 0 offers to the other ranks. Called on rank 0.

    The order of preference is: MASTER_ADDR; loopback if all ranks share one node; the
    network interface that the site profile names; the host name with the profile's
    suffix; the host name, unless it resolves to loopback; the first network interface
    that leads to other nodes.

    Raises:
        RendezvousError: the requested address or interface does not exist on this host.
    """
    if given := environ.get("MASTER_ADDR"):
        if not is_own_address(given):
            addresses = ", ".join((outward_interfaces() or all_interfaces()).values()) or "none"
            raise RendezvousError(
                f"MASTER_ADDR={given} is not an address of {world.hostname}, where rank 0 runs; unset it, "
                f"or set it to one of that host's addresses: {addresses}"
            )
        return Address(given, "MASTER_ADDR", _to_listen_at(given, world))
    if not world.is_multi_node:
        return Address(LOOPBACK, "all ranks are on one node", LOOPBACK)
    if wanted := environ.get("DDP_HPC_FABRIC_INTERFACE"):
        if fabric := fabric_interface(environ):
            return address_on_fabric(fabric)
        raise RendezvousError(
            f"DDP_HPC_FABRIC_INTERFACE={wanted}: {world.hostname} has no such network interface with an "
            "address; unset the variable, or set it to one of that host's interfaces: "
            f"{_list(all_interfaces())}"
        )
    if suffix := environ.get("DDP_HPC_FABRIC_SUFFIX"):
        name = with_suffix(world.hostname, suffix)
        if not is_own_address(name) or is_loopback(name):
            raise RendezvousError(
                f"{name} (host name and DDP_HPC_FABRIC_SUFFIX) is not an address of {world.hostname} that "
                "other nodes can reach; unset DDP_HPC_FABRIC_SUFFIX, or set DDP_HPC_FABRIC_INTERFACE to one "
                f"of that host's interfaces: {_list(outward_interfaces() or all_interfaces())}"
            )
        return Address(name, "host name and DDP_HPC_FABRIC_SUFFIX", name)
    own = socket.gethostname()
    if is_own_address(own) and not is_loopback(own):
        return Address(own, "host name")
    for name, address in outward_interfaces().items():
        why = f"interface {name}, because the name {own} does not resolve, or resolves to loopback"
        return Address(address, why, address)
    raise RendezvousError(
        f"{world.hostname} has no address that other nodes can reach ({_list(all_interfaces())}); "
        "set MASTER_ADDR or DDP_HPC_FABRIC_INTERFACE"
    )


def address_on_fabric(fabric: Interface) -> Address:
    """Returns the address of rank 0 on the network interface that the site profile names."""
    why = f"interface {fabric.name} (DDP_HPC_FABRIC_INTERFACE)"
    return Address(fabric.address, why, fabric.address)


def with_suffix(host: str, suffix: str) -> str:
    """Returns the host's name on the fabric. On some sites PBS_NODEFILE already contains the suffix."""
    return host if host.endswith(suffix) else host.partition(".")[0] + suffix


def rendezvous_point(world: World, environ: Environ) -> RendezvousPoint:
    """Returns the host and ports of rank 0 from the environment alone; the result is the same on every rank.

    Raises:
        LaunchError: the launcher's environment does not show where rank 0 is.
    """
    given, suffix = environ.get("MASTER_ADDR"), environ.get("DDP_HPC_FABRIC_SUFFIX")
    launch, first = _launch_id(environ, world.launcher), _first_host(environ)
    if given and "MASTER_PORT" in environ:
        port, listen = read_port(environ), _to_listen_at(given, world)
        if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            # The store of torchrun's agent already uses that port.
            launch = f"{launch} {given}:{port}"
            return RendezvousPoint(given, candidate_ports(launch), launch, "torchrun's agent", listen)
        # The number of ranks distinguishes this launch from others that use the same port by mistake.
        launch = f"{launch} {given}:{port} {world.world_size}".strip()
        return RendezvousPoint(given, [port], launch, "MASTER_ADDR and MASTER_PORT", listen)
    if launch and (given or not world.is_multi_node):
        host = given or LOOPBACK
        why = "MASTER_ADDR" if given else "all ranks are on one node"
        return RendezvousPoint(host, candidate_ports(launch), launch, why, _to_listen_at(host, world))
    if launch and first:
        host = with_suffix(first, suffix) if suffix else first
        why = "first node of the job" + (", fabric suffix" if suffix else "")
        return RendezvousPoint(host, candidate_ports(launch), launch, why)
    raise LaunchError(
        f"{world.launcher} started {world.world_size} ranks, but without MPI they cannot exchange an "
        f"address: run pip install mpi4py (and omit {named('discovery')}), or export MASTER_ADDR and "
        "MASTER_PORT "
        "on every rank"
    )


def read_port(environ: Environ) -> int:
    """Returns MASTER_PORT.

    Raises:
        LaunchError: MASTER_PORT is not a valid port number.
    """
    text = environ.get("MASTER_PORT", "")
    if not text.isdecimal() or len(text) > 5 or not 0 < int(text) < 65536:
        raise LaunchError(f"MASTER_PORT={text[:80]!r} is not a port number; unset it to use a free port")
    return int(text)


def _to_listen_at(host: str, world: World) -> str:
    """Returns `host` if rank 0 can listen on exactly this address; empty if it must listen on all addresses.

    For a host name the result is empty if the job has several nodes, which may resolve the name differently.
    """
    if not world.is_multi_node and is_loopback(host):
        return host
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return ""
    return host


def _launch_id(environ: Environ, launcher: str) -> str:
    """Returns a unique ID of this launch, from the IDs of job, step and attempt; empty if unknown."""
    if launcher in ("slurm", "cray_shasta", "hydra", "openmpi") and "SLURM_STEP_ID" in environ:
        names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
        return "slurm-" + ".".join(environ.get(name, "0") for name in names)
    if launcher == "torchrun":
        return f"torchrun-{environ.get('TORCHELASTIC_RUN_ID', '')}"
    if environ.get("PALS_APID"):
        return f"pals-{environ['PALS_APID']}"
    return environ.get(LAUNCH_ID, "")


def _first_host(environ: Environ) -> str:
    lists = [name for row in JOB_VARIABLES.values() for name in row.node_lists if environ.get(name)]
    if lists:
        return expand_hostlist(environ[lists[0]])[0]
    return next(iter(node_file_hosts(environ)), "")


def _list(interfaces: dict[str, str]) -> str:
    return ", ".join(f"{name} {address}" for name, address in interfaces.items()) or "none"
