"""A parameter server with torch.distributed.rpc: a remote reference, rpc_sync and rpc_async."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # keeps torch from printing C++ stacks if a rank dies

import click
import torch
import torch.distributed as dist
from ranks import BACKSTOP, SERVER, at, options, say, server_may_be_lost, share, start, together, wait_for_all
from regression import Options, ParameterServer, train
from torch.distributed import Store, TCPStore, rpc

from ddp_hpc import ConnectedWorld

_EXAMPLES = """\b
Examples:
  mpiexec -n 3 python docs/examples/rpc/with_rpc.py
  srun --ntasks=3 python docs/examples/rpc/with_rpc.py --steps 1000
  torchrun --nproc-per-node 3 docs/examples/rpc/with_rpc.py
"""

_server: ParameterServer | None = None  # set only on rank 0


def the_server() -> ParameterServer | None:
    """Returns the server. Trainers call this on rank 0 by RPC, to get a remote reference to the server."""
    return _server


def connect_rpc(world: ConnectedWorld, timeout_s: float) -> None:
    """Starts RPC at the address of rank 0. Collective: every rank must call this."""
    host, is_server = world.group.host, world.rank == SERVER
    server_port = TCPStore(host, 0, is_master=True, wait_for_workers=False) if is_server else None
    port = world.broadcast(server_port.port if server_port is not None else 0)
    store = server_port or TCPStore(host, port)

    def our_store(_: str, **__: Any) -> Iterator[tuple[Store, int, int]]:
        yield store, world.rank, world.world_size

    dist.register_rendezvous_handler("ddp-hpc", our_store)  # type: ignore[attr-defined, no-untyped-call]
    if "GLOO_SOCKET_IFNAME" in os.environ:
        # By default, TensorPipe uses the interface of the host name, which other nodes may not reach.
        os.environ.setdefault("TP_SOCKET_IFNAME", os.environ["GLOO_SOCKET_IFNAME"])
    # torch's RPC itself uses a deprecated class: https://github.com/pytorch/pytorch/issues/149393
    warnings.filterwarnings("ignore", message="You are using a Backend", category=UserWarning)
    rpc.init_rpc(  # type: ignore[no-untyped-call]
        f"rank{world.rank}",
        rank=world.rank,
        world_size=world.world_size,
        rpc_backend_options=rpc.TensorPipeRpcBackendOptions(init_method="ddp-hpc://", rpc_timeout=timeout_s),
    )


def fetch_and_send(options: Options, world: ConnectedWorld) -> None:
    """Runs the trainer. Sending a gradient overlaps with fetching the next parameters."""
    server = rpc.remote(f"rank{SERVER}", the_server)
    sent: torch.futures.Future[None] | None = None

    def push(gradient: torch.Tensor) -> None:
        nonlocal sent
        if sent is not None:
            sent.wait()
        sent = server.rpc_async().push(gradient)

    with server_may_be_lost():
        train(options, share(world), server.rpc_sync().pull, push, at(world))
        if sent is not None:
            sent.wait()
        server.rpc_sync().leave()


@click.command(epilog=_EXAMPLES)
@options
def main(**given: Any) -> None:
    """Train with asynchronous SGD on torch.distributed.rpc: rank 0 keeps the parameters, all others train."""
    global _server
    options = Options(**given)
    with together(options) as world:
        if world.rank == SERVER:
            _server = ParameterServer(options, num_trainers=world.world_size - 1)
        connect_rpc(world, BACKSTOP * options.hang_timeout_s)
        if _server is not None:
            while _server.num_training:  # the threads of RPC serve the trainers meanwhile
                time.sleep(0.05)
            say(_server.result())
        else:
            fetch_and_send(options, world)
        wait_for_all(world)  # the barrier of rpc.shutdown has a time limit, which a slow trainer can exceed
        rpc.shutdown(timeout=BACKSTOP * options.hang_timeout_s)


if __name__ == "__main__":
    start(main)
