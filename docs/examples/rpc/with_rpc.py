"""A parameter server over torch.distributed.rpc: a remote reference, rpc_sync and rpc_async."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # or torch shows C++ frames where a rank is lost

import click
import torch
import torch.distributed as dist
from ranks import BACKSTOP, SERVER, Ranks, options, say, start, together
from regression import Options, ParameterServer, train
from torch.distributed import rpc

from ddp_hpc.training.store_comm import PrefixStore, Store

_EXAMPLES = """\b
Examples:
  mpiexec -n 3 python docs/examples/rpc/with_rpc.py
  srun --ntasks=3 python docs/examples/rpc/with_rpc.py --steps 1000
  torchrun --nproc-per-node 3 docs/examples/rpc/with_rpc.py
"""

_server: ParameterServer | None = None  # on rank 0


def the_server() -> ParameterServer | None:
    """What the trainers' references point to; it is never copied. Runs on rank 0, called by trainers."""
    return _server


def connect_rpc(ranks: Ranks, timeout_s: float) -> None:
    """Starts RPC on the store that the ranks have already. Collective: every rank must call this."""

    def our_store(_: str, **__: Any) -> Iterator[tuple[Store, int, int]]:
        yield PrefixStore("rpc", ranks.link.store), ranks.world.rank, ranks.world.world_size

    dist.register_rendezvous_handler("ddp-hpc", our_store)  # type: ignore[attr-defined, no-untyped-call]
    if ranks.link.endpoint.interface:
        # TensorPipe would take the address that this host's name leads to.
        os.environ.setdefault("TP_SOCKET_IFNAME", ranks.link.endpoint.interface)
    # torch's RPC calls what torch has deprecated: https://github.com/pytorch/pytorch/issues/149393
    warnings.filterwarnings("ignore", message="You are using a Backend", category=UserWarning)
    rpc.init_rpc(  # type: ignore[no-untyped-call]
        f"rank{ranks.world.rank}",
        rank=ranks.world.rank,
        world_size=ranks.world.world_size,
        rpc_backend_options=rpc.TensorPipeRpcBackendOptions(init_method="ddp-hpc://", rpc_timeout=timeout_s),
    )


def serve(server: ParameterServer, ranks: Ranks) -> None:
    """Waits while RPC's threads answer the trainers."""
    while server.num_training:
        ranks.not_behind()
        time.sleep(0.05)


def fetch_and_send(options: Options, ranks: Ranks) -> None:
    """Trains; the sending of a gradient overlaps the fetching of the next parameters."""
    server = rpc.remote(f"rank{SERVER}", the_server)
    sent: torch.futures.Future[None] | None = None

    def push(gradient: torch.Tensor) -> None:
        nonlocal sent
        if sent is not None:
            sent.wait()
        sent = server.rpc_async().push(gradient)

    train(options, ranks.share, server.rpc_sync().pull, push, ranks.at)
    if sent is not None:
        sent.wait()
    server.rpc_sync().leave()


@click.command(epilog=_EXAMPLES)
@options
def main(**given: Any) -> None:
    """Rank 0 holds the parameters, all others train: asynchronous SGD over torch.distributed.rpc."""
    global _server
    options = Options(**given)
    with together(options) as ranks:
        if ranks.world.rank == SERVER:
            _server = ParameterServer(options, num_trainers=ranks.share[1])
        connect_rpc(ranks, BACKSTOP * options.hang_timeout_s)
        if _server is not None:
            serve(_server, ranks)
            say(_server.result())
        else:
            fetch_and_send(options, ranks)
        ranks.wait_for_all()  # RPC's own wait has a time limit, which a slow trainer may exceed
        rpc.shutdown(timeout=BACKSTOP * options.hang_timeout_s)


if __name__ == "__main__":
    start(main)
