"""A parameter server with send and recv of torch.distributed, without further packages."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor, as_completed
from enum import IntEnum
from typing import Any

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # keeps torch from printing C++ stacks if a rank dies

import click
import torch
import torch.distributed as dist
from ranks import SERVER, at, options, say, server_may_be_lost, share, start, together, wait_for_all
from regression import Options, ParameterServer, train

from ddp_hpc import ConnectedWorld

_EXAMPLES = """\b
Examples:
  mpiexec -n 3 python docs/examples/rpc/with_send_recv.py
  srun --ntasks=3 python docs/examples/rpc/with_send_recv.py --steps 1000
  torchrun --nproc-per-node 3 docs/examples/rpc/with_send_recv.py
"""


class Command(IntEnum):
    """The kind of a request, which a trainer sends as one int64 before the tensors of the request."""

    PULL = 0  # the server sends the parameters
    PUSH = 1  # the trainer sends a gradient
    LEAVE = 2  # the trainer has finished


def serve(server: ParameterServer) -> None:
    """Serves each trainer in a separate thread, so that no trainer waits for another."""
    pool = ThreadPoolExecutor(server.num_training)
    trainers = [pool.submit(answer, server, rank) for rank in range(1, server.num_training + 1)]
    for trainer in as_completed(trainers):
        trainer.result()  # raises the exception if the thread failed


def answer(server: ParameterServer, trainer: int) -> None:
    """Serves one trainer until the trainer has finished."""
    command, gradient = torch.empty((), dtype=torch.int64), torch.empty_like(server.pull())
    while True:
        dist.recv(command, src=trainer)
        if command == Command.PULL:
            dist.send(server.pull(), dst=trainer)
        elif command == Command.PUSH:
            dist.recv(gradient, src=trainer)
            server.push(gradient)
        else:
            server.leave()
            return


def fetch_and_send(options: Options, world: ConnectedWorld) -> None:
    """Runs the trainer, with send and recv for parameters and gradients."""
    parameters = torch.empty_like(ParameterServer(options, 0).pull())

    def pull() -> torch.Tensor:
        dist.send(torch.tensor(int(Command.PULL)), dst=SERVER)
        dist.recv(parameters, src=SERVER)
        return parameters

    def push(gradient: torch.Tensor) -> None:
        dist.send(torch.tensor(int(Command.PUSH)), dst=SERVER)
        dist.send(gradient, dst=SERVER)

    with server_may_be_lost():
        train(options, share(world), pull, push, at(world))
        dist.send(torch.tensor(int(Command.LEAVE)), dst=SERVER)


@click.command(epilog=_EXAMPLES)
@options
def main(**given: Any) -> None:
    """Train with asynchronous SGD on send and recv: rank 0 keeps the parameters, all others train."""
    options = Options(**given)
    with together(options) as world:
        if world.rank == SERVER:
            server = ParameterServer(options, num_trainers=world.world_size - 1)
            serve(server)
            say(server.result())
        else:
            fetch_and_send(options, world)
        wait_for_all(world)


if __name__ == "__main__":
    start(main)
