"""Computes the environment variables of torchrun for a program that another launcher started.

MPI is not initialized here, because under MPICH's mpiexec a process can initialize MPI only once, and the
program may need it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress

from ddp_hpc.base.errors import LaunchError, RendezvousError, RequestError
from ddp_hpc.base.process_status import process_started
from ddp_hpc.discovery.launcher_environment import ADDED_BY_EXEC, Environ
from ddp_hpc.discovery.rank_communication import Members
from ddp_hpc.discovery.watchdog import time_limit
from ddp_hpc.discovery.world import World, discover
from ddp_hpc.rendezvous.address import LAUNCH_ID, LOOPBACK, read_port
from ddp_hpc.rendezvous.connect_ranks import rendezvous
from ddp_hpc.rendezvous.listener import reserve_port
from ddp_hpc.rendezvous.store_comm import StoreComm

_TIMEOUT = "DDP_HPC_INIT_TIMEOUT_S"
_TIMEOUT_S = 300.0
_GOODBYE_S = 10.0


def make_torchrun_environment(
    environ: Mapping[str, str], on_address: Callable[[World, int], None] = lambda *_: None
) -> dict[str, str]:
    """Returns the variables of torchrun that `environ` lacks: RANK, WORLD_SIZE, MASTER_ADDR and others.

    The result is empty if torchrun started this process. Rank 0 keeps MASTER_PORT reserved for torch's
    store, even after it has replaced itself with another program (exec). Collective: every rank must call
    this.

    Args:
        environ: the environment of the process.
        on_address: called with the world and MASTER_PORT if the ranks have exchanged rank 0's address.

    Raises:
        LaunchError: the rank cannot be determined, or two sources contradict each other.
        RendezvousError: the ranks could not connect to each other.
    """
    environ = dict(environ)
    world = discover(environ, "auto", lambda *_: None)
    if world.launcher == "torchrun":
        return {}
    if "MASTER_ADDR" in environ and "MASTER_PORT" in environ:
        host, port, node = environ["MASTER_ADDR"], read_port(environ), None
    elif world.world_size == 1:
        host, port, node = LOOPBACK, _reserved_port(), Members([None], 0, 1)
    else:
        host, port, node = _exchange_address(world, environ)
        on_address(world, port)
    given = {
        "RANK": world.rank,
        "WORLD_SIZE": world.world_size,
        "LOCAL_RANK": world.local_rank,
        "LOCAL_WORLD_SIZE": world.local_size,
        "ROLE_NAME": "default",
        "ROLE_RANK": world.rank,
        "ROLE_WORLD_SIZE": world.world_size,
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": environ.get(LAUNCH_ID) or "ddp-hpc",
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
        # Rank 0 hosts torch's store on MASTER_PORT.
        "TORCHELASTIC_USE_AGENT_STORE": False,
    }
    node_rank, num_nodes = world.node_rank, world.num_nodes
    if node is not None:
        node_rank, num_nodes = node.index, node.num_groups
    if node_rank is not None:
        given |= {"GROUP_RANK": node_rank, "NODE_RANK": node_rank}
    if num_nodes is not None:
        given["GROUP_WORLD_SIZE"] = num_nodes
    # Variables that the user has set were compared during discovery, and are kept.
    added = {name: str(value) for name, value in given.items() if name not in environ}
    return {**added, ADDED_BY_EXEC: ",".join(added)}


def _exchange_address(world: World, environ: dict[str, str]) -> tuple[str, int, Members[None]]:
    """Returns rank 0's address, its port for torch's store, and the ranks of this node. Collective."""
    if LAUNCH_ID not in environ and not world.is_multi_node:
        # All ranks of one node have the same parent (mpiexec or its proxy), which identifies the launch.
        environ = {**environ, LAUNCH_ID: _parent_id()}
    timeout_s = _timeout_s(environ)
    prefix = f"[rank {world.rank} {world.hostname}] "
    with time_limit(timeout_s + 30.0, prefix) as watchdog:
        try:
            endpoint = rendezvous(world, environ, timeout_s, watchdog)
        except LaunchError:
            raise LaunchError(
                f"{world.launcher} started {world.world_size} ranks on several nodes, but sets no variable "
                "that identifies the launch; use ddp-hpc launch or a rendered script, or export "
                f"{LAUNCH_ID} with a unique value before mpiexec"
            ) from None
        assert endpoint is not None
        comm = StoreComm(endpoint.store, world.rank, world.world_size, timeout_s)
        node = comm.members(world.hostname, None)
        port = comm.bcast(_reserved_port() if world.rank == 0 else 0)
        comm.barrier("the start of the program")
        if world.rank == 0:
            with suppress(RendezvousError):
                endpoint.store.goodbye(_GOODBYE_S)
        endpoint.close()
    return endpoint.host, port, node


def _timeout_s(environ: Environ) -> float:
    text = environ.get(_TIMEOUT, "")
    try:
        timeout_s = float(text) if text else _TIMEOUT_S
    except ValueError:
        timeout_s = 0.0
    if not 0 < timeout_s < float("inf"):
        raise RequestError(
            f"{_TIMEOUT}={text[:80]!r} is not a positive number of seconds; use for example 300"
        )
    return timeout_s


def _reserved_port() -> int:
    """Returns a port that only torch's store can use: the program inherits the socket that reserves it."""
    reserved = reserve_port()
    reserved.set_inheritable(True)
    port: int = reserved.getsockname()[1]
    reserved.detach()
    return port


def _parent_id() -> str:
    """Returns an id of the parent process that is unique even if its process id is reused."""
    pid = os.getppid()
    return f"parent-{socket.gethostname()}-{pid}-{process_started(pid)}"
