"""`python -m ddp_hpc.world.endpoint`: where torchrun's agents meet, for `torchrun_script.sh`.

Started once on every node. Prints one line, `HOST PORT NODE_RANK LOCAL_ADDR`,
and on the head node stays until its parent ends, holding the port: bound but
not listening, so that torchrun's store can take it and nothing else can.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from dataclasses import replace

import click

from ddp_hpc.errors import (
    DdpHpcError,
    LaunchError,
    RendezvousError,
    ReportedElsewhereError,
    stop_together,
)
from ddp_hpc.world import rendezvous as meeting
from ddp_hpc.world.comm import finalize_mpi
from ddp_hpc.world.interfaces import fabric_interface, local_address_towards, outward_interfaces
from ddp_hpc.world.launch_env import Environ
from ddp_hpc.world.meeting import Door, open_listener
from ddp_hpc.world.topology import World, discover, short_hostname
from ddp_hpc.world.watchdog import time_limit


def hold_port() -> socket.socket:
    """A socket bound to a free port that only listeners with SO_REUSEADDR can share.

    torch's TCPStore is one; the kernel gives the port to nobody who asks for any.
    """
    for family in (socket.AF_INET6, socket.AF_INET):
        with contextlib.suppress(OSError):  # a host without IPv6 refuses the first
            holder = socket.socket(family)
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.bind(("", 0))
            return holder
    raise RendezvousError(f"{short_hostname()} gives no port: its network is not up")


def agree(world: World, num_nodes: int, environ: Environ, timeout_s: float) -> tuple[str, int, object]:
    """Host and port of the agents' rendezvous, and what holds the port on the head node.

    Collective: the first task of every node must call this.
    """
    node_rank = node_rank_of(world)
    holder = hold_port() if node_rank == 0 else None
    own_port = holder.getsockname()[1] if holder is not None else 0
    if num_nodes == 1:
        return "127.0.0.1", own_port, holder
    if world.mpi is not None:
        host, failure = "", ""
        if world.rank == 0:
            try:
                host = meeting.choose_address(replace(world, local_size=1), environ).host
            except RendezvousError as error:
                failure = str(error)
        host, port, failure = world.mpi.bcast((host, own_port, failure))
        if failure:
            stop_together(world.rank, RendezvousError(failure))
        return host, port, holder
    # A world of agents: MASTER_PORT, if the user set one, is the training's own.
    wanted = {name: value for name, value in environ.items() if name != "MASTER_PORT"}
    point = meeting.meeting_point(replace(world, local_size=1), wanted)
    if holder is not None:
        door = Door(open_listener(point.ports, loopback_only=False), point.key, {"port": own_port})
        meeting.wait_for_all(door, set(range(1, num_nodes)), timeout_s, point.host)
        door.listener.close()
        return point.host, own_port, holder
    answer = meeting.knock_and_wait(point, f"node {world.hostname}", node_rank, timeout_s, timeout_s + 10.0)
    return point.host, int(answer["port"]), None


def node_rank_of(world: World) -> int:
    """This node's index.

    Raises:
        LaunchError: where the launcher does not tell it and several tasks share a node.
    """
    if world.node_rank is not None:
        return world.node_rank
    if world.local_size == 1:
        return world.rank
    raise LaunchError(
        f"{world.launcher} started {world.local_size} tasks on {world.hostname} and does not tell the node's "
        "index; start one task a node (mpiexec -ppn 1)"
    )


def local_address(host: str, port: int, environ: Environ) -> str:
    """The address under which the other nodes reach this one."""
    if found := fabric_interface(environ):
        return found[1]
    if host == "127.0.0.1":
        return host
    own = local_address_towards(host, port)
    if own is None or own.startswith("127."):
        own = next(iter(outward_interfaces().values()), None)
    return own or short_hostname()


def _wait_for_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)


@click.command(
    help="Agree with the other nodes on torchrun's endpoint: prints HOST PORT NODE_RANK LOCAL_ADDR."
)
@click.option("--nodes", "num_nodes", type=click.IntRange(min=1), required=True, help="Nodes that take part.")
@click.option("--timeout-s", type=float, default=300.0, show_default=True, help="Longest wait for them.")
def main(num_nodes: int, timeout_s: float) -> None:
    """See the module's docstring."""
    parent, environ = os.getppid(), dict(os.environ)
    prefix = f"[{short_hostname()}] "
    try:
        with time_limit(timeout_s + 30, prefix) as watchdog:
            watchdog.stage("for the other nodes' first tasks")
            world = discover(environ)
            host, port, holder = agree(world, num_nodes, environ, timeout_s)
            finalize_mpi()  # the head node stays, the others go
            line = f"{host} {port} {node_rank_of(world)} {local_address(host, port, environ)}"
    except DdpHpcError as error:
        if not isinstance(error, ReportedElsewhereError):
            click.echo(f"{prefix}error: {error}", err=True)
        finalize_mpi()
        sys.exit(error.exit_code)
    with contextlib.suppress(BrokenPipeError):
        click.echo(line)
        sys.stdout.flush()
    if holder is not None:
        _wait_for_parent(parent)


if __name__ == "__main__":
    main()
