"""`python -m ddp_hpc.torchrun.endpoint`: the rendezvous endpoint of torchrun's agents.

`torchrun_script.sh` starts it once on every node. It prints a `Rendezvous` as one line of JSON, and runs
until its parent ends. On the first node it serves the store for the rendezvous of the agents. For torch's
rendezvous backend c10d it reserves the port of torch's store instead: the port is bound, but does not listen,
so that only torch's store can use it. At the end it removes the key file.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import click

from ddp_hpc.base.errors import (
    EXIT_FAILED,
    DdpHpcError,
    LaunchError,
    RendezvousError,
    ReportedElsewhereError,
    stop_together,
)
from ddp_hpc.discovery.launcher_environment import Environ
from ddp_hpc.discovery.network_interfaces import fabric_interface, local_address_towards, outward_interfaces
from ddp_hpc.discovery.rank_communication import Comm, finalize_mpi
from ddp_hpc.discovery.watchdog import time_limit
from ddp_hpc.discovery.world import World, discover, short_hostname
from ddp_hpc.rendezvous.address import LOOPBACK, choose_address, rendezvous_point
from ddp_hpc.rendezvous.connect_ranks import Joining, serve_store, wait_for_ranks
from ddp_hpc.rendezvous.launch_secret import new_secret, shared_secret, write_secret
from ddp_hpc.rendezvous.listener import open_listener, reserve_port
from ddp_hpc.rendezvous.store_process import StoreProcess
from ddp_hpc.torchrun.step import Rendezvous


@dataclass(frozen=True)
class AgentEndpoint:
    """The address and key of the rendezvous of torchrun's agents."""

    host: str
    port: int
    key: bytes
    note: str = ""
    kept: object = None
    """On the first node: the store's server or the reserved port of torch's store, which must stay open."""


def agree_on_endpoint(
    world: World, num_nodes: int, environ: Environ, timeout_s: float, *, for_torch: bool
) -> AgentEndpoint:
    """Returns the endpoint of the agents, the same on all nodes.

    Collective: the first task of every node must call this.

    Args:
        world: the tasks that the launcher started.
        num_nodes: the number of nodes, each with one calling task.
        environ: the process's environment.
        timeout_s: how long to wait for the other nodes, in seconds.
        for_torch: whether the agents use torch's own store, which opens the port itself.

    Raises:
        RendezvousError: a node is missing, or the requested address is not available.
    """
    if num_nodes == 1:
        return _open_endpoint(LOOPBACK, LOOPBACK, for_torch=for_torch)
    node_rank = node_rank_of(world)
    # In this world each rank is an agent, which may start several ranks of the training on its node.
    world = replace(world, local_size=1)
    if world.mpi is not None:
        return _over_mpi(world, world.mpi, environ, for_torch=for_torch)
    return _without_mpi(world, node_rank, num_nodes, environ, timeout_s, for_torch=for_torch)


def _open_endpoint(host: str, listen: str, *, for_torch: bool) -> AgentEndpoint:
    key = new_secret()
    if for_torch:
        reserved = reserve_port()
        return AgentEndpoint(host, reserved.getsockname()[1], key, kept=reserved)
    listener = open_listener([0], listen)
    port = listener.getsockname()[1]
    return AgentEndpoint(host, port, key, kept=StoreProcess(listener, key))


def _over_mpi(world: World, comm: Comm, environ: Environ, *, for_torch: bool) -> AgentEndpoint:
    endpoint, failure = AgentEndpoint("", 0, b""), ""
    if world.rank == 0:
        try:
            address = choose_address(world, environ)
            endpoint = _open_endpoint(address.host, address.listen, for_torch=for_torch)
        except RendezvousError as error:
            failure = str(error)
    host, port, key, failure = comm.bcast((endpoint.host, endpoint.port, endpoint.key, failure))
    if failure:
        stop_together(world.rank, RendezvousError(failure))
    return replace(endpoint, host=host, port=port, key=key)


def _without_mpi(
    world: World, node_rank: int, num_nodes: int, environ: Environ, timeout_s: float, *, for_torch: bool
) -> AgentEndpoint:
    # A MASTER_PORT that the user has set is for the training, not for the agents.
    own = {name: value for name, value in environ.items() if name != "MASTER_PORT"}
    point = rendezvous_point(world, own)
    key, note = shared_secret(environ, f"agents of {point.launch}")
    if node_rank != 0:
        name = f"node {world.hostname}"
        joining = Joining(point, lambda: key, node_rank, name)
        store = joining.connect(timeout_s)
        answer = joining.join(store, timeout_s + 10.0)
        store.close()
        return AgentEndpoint(point.host, int(answer["port"]), key, note)
    process, store = serve_store(point, key, world.hostname)
    reserved = reserve_port() if for_torch else None
    port = reserved.getsockname()[1] if reserved is not None else store.port
    wait_for_ranks(store, list(range(1, num_nodes)), timeout_s, {"port": str(port)})
    store.close()
    return AgentEndpoint(point.host, port, key, note, kept=(process, reserved))


def node_rank_of(world: World) -> int:
    """Returns this node's index, from 0.

    Raises:
        LaunchError: the launcher does not provide it and several tasks share a node.
    """
    if world.node_rank is not None:
        return world.node_rank
    if world.local_size == 1:
        return world.rank
    raise LaunchError(
        f"{world.launcher} started {world.local_size} tasks on {world.hostname} and does not provide the "
        f"index of the node; start one task per node (mpiexec -ppn 1)"
    )


def local_address(host: str, port: int, environ: Environ) -> str:
    """Returns the address at which the other nodes can reach this node."""
    if fabric := fabric_interface(environ):
        return fabric.address
    if host == "127.0.0.1":
        return host
    own = local_address_towards(host, port)
    if own is None or own.startswith("127."):
        own = next(iter(outward_interfaces().values()), None)
    return own or short_hostname()


def write_key_file(key: bytes) -> Path:
    """Writes the key to a file that only this user can read, in a new directory on this node."""
    path = Path(tempfile.mkdtemp(prefix="ddp-hpc-")) / "key"
    write_secret(path, key)
    return path


@click.command(help="Agree with the other nodes on the rendezvous endpoint of torchrun's agents.")
@click.option(
    "--nodes", "num_nodes", type=click.IntRange(min=1), required=True, help="Number of nodes of the job."
)
@click.option(
    "--rendezvous",
    type=click.Choice(["ddp-hpc", "c10d"]),
    default="ddp-hpc",
    show_default=True,
    help="Rendezvous backend of the torchrun agents: the store of ddp-hpc, which requires the job's key, or "
    "that of PyTorch (c10d).",
)
@click.option(
    "--timeout-s",
    type=float,
    default=300.0,
    show_default=True,
    help="Time in seconds to wait for the other nodes.",
)
def main(num_nodes: int, rendezvous: str, timeout_s: float) -> None:
    """Run the rendezvous endpoint of this node; see the docstring of the module."""
    parent, environ = os.getppid(), dict(os.environ)
    prefix = f"[{short_hostname()}] "
    try:
        with time_limit(timeout_s + 30, prefix) as watchdog:
            watchdog.stage("for the other nodes' first tasks")
            world = discover(environ)
            endpoint = agree_on_endpoint(world, num_nodes, environ, timeout_s, for_torch=rendezvous == "c10d")
            finalize_mpi()
            local = local_address(endpoint.host, endpoint.port, environ)
            # Signals end the script. This process ignores them, because it must clean up after the script.
            for sig in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
                signal.signal(sig, lambda *_: None)
            key_file = write_key_file(endpoint.key)
    except (DdpHpcError, OSError) as error:
        if not isinstance(error, ReportedElsewhereError):
            click.echo(f"{prefix}error: {error}", err=True)
        finalize_mpi()
        sys.exit(error.exit_code if isinstance(error, DdpHpcError) else EXIT_FAILED)
    if endpoint.note:
        click.echo(f"{prefix}note: {endpoint.note}", err=True)
    answer = Rendezvous(endpoint.host, endpoint.port, node_rank_of(world), local, str(key_file))
    try:  # `endpoint.kept` stays open until this process ends
        with contextlib.suppress(BrokenPipeError):
            click.echo(json.dumps(asdict(answer)))
            sys.stdout.flush()
        while os.getppid() == parent:
            time.sleep(0.5)
    finally:
        shutil.rmtree(key_file.parent, ignore_errors=True)


if __name__ == "__main__":
    main()
