"""Where the ranks meet: rank 0 chooses an address, holds a port, and proves that all nodes reach it.

The result is an endpoint for the process group's store. It never rests on a
fixed port, on a bare `hostname`, or on hope: before any backend starts, each
node's first rank has connected and been answered.
"""

from __future__ import annotations

import secrets
import socket
import threading
from dataclasses import dataclass

from ddp_hpc.errors import LaunchError, RendezvousError, ReportedElsewhereError, stop_together
from ddp_hpc.world.comm import Comm
from ddp_hpc.world.hostlist import expand_hostlist
from ddp_hpc.world.interfaces import (
    all_interfaces,
    fabric_interface,
    interface_of,
    is_loopback,
    is_own_address,
    local_address_towards,
    outward_interfaces,
)
from ddp_hpc.world.launch_env import Environ, pbs_hosts
from ddp_hpc.world.meeting import Door, candidate_ports, knock, open_listener
from ddp_hpc.world.topology import World, short_hostname
from ddp_hpc.world.watchdog import Watchdog

_PROBE_S = 20.0  # rank 0 already listens when the others start: more waiting would not help


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """The store's address, as every rank shall use it."""

    host: str
    port: int
    why: str  # how the address was chosen
    interface: str | None  # this host's interface that leads there
    listener: socket.socket | None = None  # rank 0 alone: bound, listening, for the store to take over
    agent_hosts_it: bool = False  # torchrun's agent keeps the store already


@dataclass(frozen=True)
class Address:
    """A host that the other ranks can connect to, and the reason it was taken."""

    host: str
    why: str


@dataclass(frozen=True)
class MeetingPoint:
    """Where ranks that cannot pass messages yet find rank 0: the ports are tried in turn."""

    host: str
    ports: list[int]
    key: str  # what only the ranks of this launch share
    why: str


def rendezvous(world: World, environ: Environ, timeout_s: float, watchdog: Watchdog) -> Endpoint | None:
    """The endpoint that all ranks agree on; None in a world of one.

    Collective: every rank must call this.

    Raises:
        RendezvousError: on rank 0 (ReportedElsewhereError on the others), naming the nodes that did
            not come or cannot reach the address, with port, interface and cause.
    """
    if world.world_size == 1:
        return None
    if world.launcher == "torchrun" and environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return _at_agent(world, environ, timeout_s)
    if world.mpi is not None:
        return _over_mpi(world, world.mpi, environ, timeout_s, watchdog)
    watchdog.stage("for the ranks to meet at rank 0's address")
    return _by_knocking(world, environ, timeout_s)


def choose_address(world: World, environ: Environ) -> Address:
    """The address that rank 0 offers. Called on rank 0.

    In this order: MASTER_ADDR; loopback where all ranks share the node; the
    interface and then the suffix that the profile gives; this host's name, unless
    it leads to loopback; the first interface that leads outward.

    Raises:
        RendezvousError: where what was asked for is not there.
    """
    if given := environ.get("MASTER_ADDR"):
        if not is_own_address(given):
            raise RendezvousError(
                f"MASTER_ADDR={given} is no address of {world.hostname}, where rank 0 runs "
                f"({_list(outward_interfaces() or all_interfaces())}); unset it, or set it to one of these"
            )
        return Address(given, "MASTER_ADDR")
    if not world.is_multi_node:
        return Address("127.0.0.1", "all ranks are on one node")
    if wanted := environ.get("DDP_HPC_FABRIC_INTERFACE"):
        if found := fabric_interface(environ):
            return Address(found[1], f"interface {found[0]} (DDP_HPC_FABRIC_INTERFACE)")
        raise RendezvousError(
            f"DDP_HPC_FABRIC_INTERFACE={wanted}: {world.hostname} has no such interface with an address; "
            f"it has {_list(all_interfaces())}"
        )
    if suffix := environ.get("DDP_HPC_FABRIC_SUFFIX"):
        name = with_suffix(world.hostname, suffix)
        if not is_own_address(name) or is_loopback(name):
            raise RendezvousError(
                f"{name} (host name and DDP_HPC_FABRIC_SUFFIX) is no address of {world.hostname}; it has "
                f"{_list(all_interfaces())}: unset the suffix, or name the interface in "
                "DDP_HPC_FABRIC_INTERFACE"
            )
        return Address(name, "host name and DDP_HPC_FABRIC_SUFFIX")
    own = socket.gethostname()
    if is_own_address(own) and not is_loopback(own):
        return Address(own, "host name")
    for name, address in outward_interfaces().items():
        return Address(address, f"interface {name}, as the name {own} leads to loopback or nowhere")
    raise RendezvousError(
        f"{world.hostname} has no address that another node could reach ({_list(all_interfaces())}); "
        "set MASTER_ADDR or DDP_HPC_FABRIC_INTERFACE"
    )


def with_suffix(host: str, suffix: str) -> str:
    """The host's name on the fabric. PBS_NODEFILE already has the suffix on some sites: never twice."""
    return host if host.endswith(suffix) else host.partition(".")[0] + suffix


def offer(world: World, environ: Environ) -> tuple[Address, socket.socket]:
    """Rank 0's address and a listening socket there, on MASTER_PORT or a port that the kernel chose."""
    address = choose_address(world, environ)
    ports = [_port(environ)] if "MASTER_PORT" in environ else [0]
    return address, open_listener(ports, loopback_only=address.host == "127.0.0.1")


def _over_mpi(world: World, comm: Comm, environ: Environ, timeout_s: float, watchdog: Watchdog) -> Endpoint:
    """Rank 0's address and port by broadcast, then a knock from each node. Collective."""
    watchdog.stage("in MPI for rank 0's address")
    failure, key, host, port, why, listener = "", "", "", 0, "", None
    if world.rank == 0:
        try:
            address, listener = offer(world, environ)
            host, why, port, key = address.host, address.why, listener.getsockname()[1], secrets.token_hex(8)
        except RendezvousError as error:
            failure = str(error)
    failure, key, host, port, why = comm.bcast((failure, key, host, port, why))
    if failure:
        stop_together(world.rank, RendezvousError(failure))

    watchdog.stage(f"in MPI for every node to reach {host}:{port}")
    door, helper = None, None
    if listener is not None:
        door = Door(listener, key, {"port": port})
        helper = threading.Thread(target=door.serve, args=({-1}, float("inf")), daemon=True)
        helper.start()
    problem = ""
    if world.local_rank == 0:
        try:
            knock(host, [port], key, world.rank, min(timeout_s, _PROBE_S)).connection.close()
        except RendezvousError as error:
            problem = (
                f"node {world.hostname} (rank {world.rank}) cannot reach rank 0 at {host}:{port}: {error}"
            )
    problems = [text for text in comm.allgather(problem) if text]
    if door is not None and helper is not None:
        door.stop()
        helper.join()
        door.dismiss()
    # Nobody may connect to the store before the door is shut: it would be turned away.
    comm.barrier("the end of the rendezvous")
    if problems:
        hint = "name the right network in DDP_HPC_FABRIC_INTERFACE or MASTER_ADDR"
        text = f"{problems[0]} ({why}); {len(problems)} node(s) cannot; {hint}"
        stop_together(world.rank, RendezvousError(text))
    return _endpoint(world, environ, host, port, why, listener)


def _by_knocking(world: World, environ: Environ, timeout_s: float) -> Endpoint:
    """Without MPI: all know the first node's name and a list of ports, and meet there. Collective."""
    point = meeting_point(world, environ)
    if world.rank == 0:
        _check_first_node(world, point.host)
        listener = open_listener(point.ports, loopback_only=point.host == "127.0.0.1")
        host, why = _store_host(point, environ)
        door = Door(listener, point.key, {"host": host, "port": listener.getsockname()[1]})
        wait_for_all(door, set(range(1, world.world_size)), timeout_s, point.host)
        return _endpoint(world, environ, host, listener.getsockname()[1], why, listener)
    who = f"node {world.hostname} (rank {world.rank})"
    # Rank 0 counts from its own start and knows who is missing: it is to give up first.
    answer = knock_and_wait(point, who, world.rank, timeout_s, timeout_s + 10.0)
    return _endpoint(world, environ, str(answer["host"]), int(answer["port"]), point.why, None)


def wait_for_all(door: Door, ids: set[int], timeout_s: float, host: str) -> None:
    """Rank 0's part of a meeting: waits for everyone, then sends them on.

    Raises:
        RendezvousError: where some did not come; the others are told and stop in silence.
    """
    missing = door.serve(ids, timeout_s)
    if missing:
        where = f"{host}:{door.listener.getsockname()[1]}"
        text = _missing_text(missing, ids, door.arrived, where, timeout_s)
        door.dismiss(f"error {text}")
        raise RendezvousError(text)
    door.dismiss()


def knock_and_wait(
    point: MeetingPoint, who: str, number: int, knock_s: float, verdict_s: float
) -> dict[str, str | int]:
    """The others' part of a meeting: finds the door, waits inside for `go`, gives rank 0's answer.

    Raises:
        RendezvousError: where the door is not found.
        ReportedElsewhereError: where rank 0 says why the job cannot go on.
    """
    try:
        welcome = knock(point.host, point.ports, point.key, number, knock_s)
    except RendezvousError as error:
        way = local_address_towards(point.host, point.ports[0])
        interface = interface_of(way) if way else None
        raise RendezvousError(
            f"{who} cannot reach rank 0 ({point.why}; from here by interface {interface or 'none'})"
        ) from error
    verdict = welcome.wait_for_go(verdict_s)
    if not verdict:
        raise RendezvousError(f"{who}: rank 0 at {point.host}:{welcome.port} ended, or waits for other ranks")
    if verdict != "go":
        raise ReportedElsewhereError(verdict)
    return welcome.answer


def _store_host(point: MeetingPoint, environ: Environ) -> tuple[str, str]:
    """The store's address: the fabric's, where the profile names an interface only rank 0 can look up."""
    if "MASTER_ADDR" not in environ and point.host != "127.0.0.1" and (found := fabric_interface(environ)):
        return found[1], f"interface {found[0]} (DDP_HPC_FABRIC_INTERFACE)"
    return point.host, point.why


def meeting_point(world: World, environ: Environ) -> MeetingPoint:
    """Where to meet, the same on every rank, from the environment alone.

    Raises:
        LaunchError: for a launcher whose environment does not tell where rank 0 is.
    """
    given, suffix = environ.get("MASTER_ADDR"), environ.get("DDP_HPC_FABRIC_SUFFIX")
    key, first = _launch_key(environ, world.launcher), _first_host(environ)
    if given and "MASTER_PORT" in environ:
        port = _port(environ)
        return MeetingPoint(given, [port], key or f"{given}:{port}", "MASTER_ADDR and MASTER_PORT")
    if key and (given or not world.is_multi_node):
        host = given or "127.0.0.1"
        why = "MASTER_ADDR" if given else "all ranks are on one node"
        return MeetingPoint(host, candidate_ports(key), key, why)
    if key and first:
        host = with_suffix(first, suffix) if suffix else first
        why = "first node of the job" + (", fabric suffix" if suffix else "")
        return MeetingPoint(host, candidate_ports(key), key, why)
    raise LaunchError(
        f"{world.launcher} started {world.world_size} ranks, but without MPI they cannot tell each other "
        "an address: pip install mpi4py (and leave --discovery out), or export MASTER_ADDR and MASTER_PORT "
        "on every rank"
    )


def _launch_key(environ: Environ, launcher: str) -> str:
    """What only the ranks of this one launch share: job, step and attempt."""
    if launcher in ("slurm", "cray_shasta", "hydra", "openmpi") and "SLURM_STEP_ID" in environ:
        names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
        return "slurm-" + ".".join(environ.get(name, "0") for name in names)
    return f"pals-{environ['PALS_APID']}" if environ.get("PALS_APID") else ""


def _first_host(environ: Environ) -> str:
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"):
        if environ.get(name):
            return expand_hostlist(environ[name])[0]
    return next(iter(pbs_hosts(environ)), "")


def _check_first_node(world: World, host: str) -> None:
    """With an arbitrary task distribution rank 0 may be on another node than the list's first."""
    if not is_own_address(host) and host.partition(".")[0] != world.hostname:
        raise RendezvousError(
            f"the ranks are to meet at {host}, but rank 0 runs on {world.hostname}; "
            f"export MASTER_ADDR={world.hostname} before the launch"
        )


def _at_agent(world: World, environ: Environ, timeout_s: float) -> Endpoint:
    """The agent of torchrun keeps the store: only the way to it is proved, once a node."""
    host, port = environ.get("MASTER_ADDR", ""), _port(environ)
    if not host:
        raise LaunchError("torchrun is here but MASTER_ADDR is not set; start the ranks with torchrun anew")
    if world.local_rank == 0:
        try:
            socket.create_connection((host, port), timeout=min(timeout_s, _PROBE_S)).close()
        except (OSError, UnicodeError) as error:
            raise RendezvousError(
                f"node {world.hostname} cannot reach torchrun's store at {host}:{port}; pass the fabric's "
                "address with --local-addr (torchrun_script.sh does)"
            ) from error
    return Endpoint(
        host=host,
        port=port,
        why="torchrun's agent",
        interface=_interface_towards(world, environ, host, port),
        agent_hosts_it=True,
    )


def _endpoint(
    world: World, environ: Environ, host: str, port: int, why: str, listener: socket.socket | None
) -> Endpoint:
    interface = _interface_towards(world, environ, host, port)
    return Endpoint(host=host, port=port, why=why, interface=interface, listener=listener)


def _interface_towards(world: World, environ: Environ, host: str, port: int) -> str | None:
    """The interface on which peers shall reach this rank: the fabric's, else the one that leads to rank 0."""
    if not world.is_multi_node:
        return "lo"
    if found := fabric_interface(environ):
        return found[0]
    own = local_address_towards(host, port)
    if own is None or own.startswith("127."):
        # Rank 0's own name may lead to loopback (Debian's 127.0.1.1); its peers come from outside.
        return next(iter(outward_interfaces()), None)
    return interface_of(own)


def _port(environ: Environ) -> int:
    text = environ.get("MASTER_PORT", "")
    if not text.isdecimal() or len(text) > 5 or not 0 < int(text) < 65536:
        raise LaunchError(f"MASTER_PORT={text[:80]!r} is no port; unset it and a free one is found")
    return int(text)


def _missing_text(
    missing: set[int], ids: set[int], arrived: dict[int, str], where: str, timeout_s: float
) -> str:
    ranks = ", ".join(str(rank) for rank in sorted(missing)[:8]) + (", ..." if len(missing) > 8 else "")
    hosts = sorted(set(arrived.values()))
    came = f"; ranks on {', '.join(hosts[:8])} did" if hosts else ""
    return (
        f"{len(missing)} of {len(ids)} ranks did not come to rank 0 ({short_hostname()}, {where}) within "
        f"{timeout_s:g} s: rank {ranks}{came}; look for their errors above, or raise the time limit"
    )


def _list(interfaces: dict[str, str]) -> str:
    return ", ".join(f"{name} {address}" for name, address in interfaces.items()) or "none"
