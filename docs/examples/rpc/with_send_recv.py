"""The same parameter server over torch.distributed's send and recv: no RPC, nothing to install."""

from __future__ import annotations

import os
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from enum import IntEnum
from typing import Any

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # or torch shows C++ frames where a rank is lost

import click
import torch
import torch.distributed as dist
from ranks import SERVER, Ranks, options, say, start, together
from regression import Options, ParameterServer, train

_EXAMPLES = """\b
Examples:
  mpiexec -n 3 python docs/examples/rpc/with_send_recv.py
  srun --ntasks=3 python docs/examples/rpc/with_send_recv.py --steps 1000
  torchrun --nproc-per-node 3 docs/examples/rpc/with_send_recv.py
"""


class Word(IntEnum):
    """What a trainer wants: it sends this first, as one int64."""

    PULL = 0  # the server sends the parameters
    PUSH = 1  # the trainer sends a gradient
    LEAVE = 2


def serve(server: ParameterServer, ranks: Ranks) -> None:
    """Answers each trainer in a thread of its own, so that none waits for another."""
    pool = ThreadPoolExecutor(server.num_trainers)
    trainers = [pool.submit(answer, server, rank) for rank in range(1, server.num_trainers + 1)]
    running = set(trainers)
    while running:
        done, running = wait(running, timeout=0.05, return_when=FIRST_EXCEPTION)
        ranks.not_behind()
        for trainer in done:
            trainer.result()  # raises what its thread raised


def answer(server: ParameterServer, trainer: int) -> None:
    """Does what one trainer wants until it leaves."""
    word, gradient = torch.empty((), dtype=torch.int64), torch.empty_like(server.pull())
    while True:
        dist.recv(word, src=trainer)
        if word == Word.PULL:
            dist.send(server.pull(), dst=trainer)
        elif word == Word.PUSH:
            dist.recv(gradient, src=trainer)
            server.push(gradient)
        else:
            server.leave()
            return


def fetch_and_send(options: Options, ranks: Ranks) -> None:
    """Trains."""
    parameters = torch.empty_like(ParameterServer(options, 0).pull())

    def pull() -> torch.Tensor:
        dist.send(torch.tensor(int(Word.PULL)), dst=SERVER)
        dist.recv(parameters, src=SERVER)
        return parameters

    def push(gradient: torch.Tensor) -> None:
        dist.send(torch.tensor(int(Word.PUSH)), dst=SERVER)
        dist.send(gradient, dst=SERVER)

    train(options, ranks.share, pull, push, ranks.at)
    dist.send(torch.tensor(int(Word.LEAVE)), dst=SERVER)


@click.command(epilog=_EXAMPLES)
@options
def main(**given: Any) -> None:
    """Rank 0 holds the parameters, all others train: asynchronous SGD over send and recv."""
    options = Options(**given)
    with together(options) as ranks:
        if ranks.world.rank == SERVER:
            server = ParameterServer(options, num_trainers=ranks.share[1])
            serve(server, ranks)
            say(server.result())
        else:
            fetch_and_send(options, ranks)


if __name__ == "__main__":
    start(main)
