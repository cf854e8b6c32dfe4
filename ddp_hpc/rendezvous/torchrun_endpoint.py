"""`python -m ddp_hpc.rendezvous.torchrun_endpoint`: where torchrun's agents meet, for `torchrun_script.sh`.

Started once on every node. Prints one line, `HOST PORT NODE_RANK LOCAL_ADDR KEY_FILE`, and stays
until its parent ends: on the head node it serves the store in which the agents meet, or, for torch's
own rendezvous c10d, holds the port for torch's store: bound but not listening, so that this one can
take it and nothing else can. On all nodes it removes the key's file in the end.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import click

from ddp_hpc.discovery.comm import Comm, finalize_mpi
from ddp_hpc.discovery.launcher_environment import Environ
from ddp_hpc.discovery.network_interfaces import fabric_interface, local_address_towards, outward_interfaces
from ddp_hpc.discovery.watchdog import time_limit
from ddp_hpc.discovery.world import World, discover, short_hostname
from ddp_hpc.errors import (
    EXIT_FAILED,
    DdpHpcError,
    LaunchError,
    RendezvousError,
    ReportedElsewhereError,
    stop_together,
)
from ddp_hpc.rendezvous.address import LOOPBACK, choose_address, meeting_point
from ddp_hpc.rendezvous.connect_ranks import RANK_0_GONE, join, serve_at, wait_for_all
from ddp_hpc.rendezvous.job_key import new_key, shared_key, write_key
from ddp_hpc.rendezvous.listener import open_listener
from ddp_hpc.rendezvous.store_process import StoreProcess


@dataclass(frozen=True)
class Meeting:
    """Where the agents meet, and the key that they need there."""

    host: str
    port: int
    key: bytes
    note: str = ""
    kept: object = None
    """On the head node: the store's server or torch's port, which has to be kept."""


def agree(world: World, num_nodes: int, environ: Environ, timeout_s: float, *, for_torch: bool) -> Meeting:
    """Where the agents meet. Collective: the first task of every node must call this.

    Args:
        world: the tasks that the launcher started.
        num_nodes: how many of them are the first of their node.
        environ: the process's environment.
        timeout_s: how long to wait for the others.
        for_torch: the agents use torch's own store, which listens at the port by itself.

    Raises:
        RendezvousError: some node did not come, or the address is not to be had.
    """
    if num_nodes == 1:
        return _offer(LOOPBACK, LOOPBACK, for_torch=for_torch)
    node_rank = node_rank_of(world)
    # The agents are the world here: each may start several ranks, which share its node.
    world = replace(world, local_size=1)
    if world.mpi is not None:
        return _over_mpi(world, world.mpi, environ, for_torch=for_torch)
    return _without_messages(world, node_rank, num_nodes, environ, timeout_s, for_torch=for_torch)


def _offer(host: str, listen: str, *, for_torch: bool) -> Meeting:
    key = new_key()
    if for_torch:
        holder = hold_port()
        return Meeting(host, holder.getsockname()[1], key, kept=holder)
    listener = open_listener([0], listen)
    return Meeting(host, listener.getsockname()[1], key, kept=StoreProcess(listener, key, RANK_0_GONE))


def _over_mpi(world: World, comm: Comm, environ: Environ, *, for_torch: bool) -> Meeting:
    meeting, failure = Meeting("", 0, b""), ""
    if world.rank == 0:
        try:
            address = choose_address(world, environ)
            meeting = _offer(address.host, address.listen, for_torch=for_torch)
        except RendezvousError as error:
            failure = str(error)
    host, port, key, failure = comm.bcast((meeting.host, meeting.port, meeting.key, failure))
    if failure:
        stop_together(world.rank, RendezvousError(failure))
    return replace(meeting, host=host, port=port, key=key)


def _without_messages(
    world: World, node_rank: int, num_nodes: int, environ: Environ, timeout_s: float, *, for_torch: bool
) -> Meeting:
    # MASTER_PORT, if the user set one, is the training's own.
    point = meeting_point(world, {name: value for name, value in environ.items() if name != "MASTER_PORT"})
    key, note = shared_key(environ, f"agents of {point.launch}")
    if node_rank != 0:
        who = f"node {world.hostname}"
        store, answer = join(point, lambda: key, node_rank, who, timeout_s, timeout_s + 10.0)
        store.close()
        return Meeting(point.host, int(answer["port"]), key, note)
    process, store = serve_at(point, key, world.hostname)
    holder = hold_port() if for_torch else None
    port = holder.getsockname()[1] if holder is not None else store.port
    wait_for_all(store, list(range(1, num_nodes)), timeout_s, {"port": str(port)})
    store.close()
    return Meeting(point.host, port, key, note, kept=(process, holder))


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


def write_key_file(key: bytes) -> Path:
    """A file with the key that only this user can read, alone in a directory of its own on this node."""
    path = Path(tempfile.mkdtemp(prefix="ddp-hpc-")) / "key"
    write_key(path, key)
    return path


def _wait_for_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)


@click.command(help="Agree with the other nodes on where the agents of torchrun meet.")
@click.option("--nodes", "num_nodes", type=click.IntRange(min=1), required=True, help="Nodes that take part.")
@click.option(
    "--rendezvous",
    type=click.Choice(["ddp-hpc", "c10d"]),
    default="ddp-hpc",
    show_default=True,
    help="Whose store the agents use: this package's, which asks for the job's key, or torch's.",
)
@click.option("--timeout-s", type=float, default=300.0, show_default=True, help="Longest wait for them.")
def main(num_nodes: int, rendezvous: str, timeout_s: float) -> None:
    """See the module's docstring."""
    run(num_nodes, timeout_s, for_torch=rendezvous == "c10d")


def run(num_nodes: int, timeout_s: float, *, for_torch: bool, prints_key_file: bool = True) -> None:
    """Agrees with the other nodes, prints the address, and keeps it until the parent process has ended."""
    parent, environ = os.getppid(), dict(os.environ)
    prefix = f"[{short_hostname()}] "
    try:
        with time_limit(timeout_s + 30, prefix) as watchdog:
            watchdog.stage("for the other nodes' first tasks")
            world = discover(environ)
            meeting = agree(world, num_nodes, environ, timeout_s, for_torch=for_torch)
            finalize_mpi()
            local = local_address(meeting.host, meeting.port, environ)
            # Whoever ends the job ends the script, and this process after it, which has to clean up.
            for sig in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
                signal.signal(sig, lambda *_: None)
            key_file = write_key_file(meeting.key)
    except (DdpHpcError, OSError) as error:
        if not isinstance(error, ReportedElsewhereError):
            click.echo(f"{prefix}error: {error}", err=True)
        finalize_mpi()
        sys.exit(error.exit_code if isinstance(error, DdpHpcError) else EXIT_FAILED)
    if meeting.note:
        click.echo(f"{prefix}note: {meeting.note}", err=True)
    try:  # the end of this process ends what `meeting` keeps
        with contextlib.suppress(BrokenPipeError):
            line = f"{meeting.host} {meeting.port} {node_rank_of(world)} {local}"
            click.echo(f"{line} {key_file}" if prints_key_file else line)
            sys.stdout.flush()
        _wait_for_parent(parent)
    finally:
        shutil.rmtree(key_file.parent, ignore_errors=True)


if __name__ == "__main__":
    main()
