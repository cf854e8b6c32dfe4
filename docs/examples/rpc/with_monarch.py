"""A parameter server with actors of Monarch, which PyTorch's tutorials list next to RPC."""

from __future__ import annotations

import os
import sys
from typing import Any

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # keeps torch from printing C++ stacks if a rank dies

import click
import torch

try:
    import monarch.actor
except ModuleNotFoundError as error:
    if error.name != "monarch":
        raise
    # The package on PyPI is torchmonarch; "monarch" is an unrelated package.
    print("error: torchmonarch is not installed; run `pip install torchmonarch`", file=sys.stderr)
    sys.exit(2)
from monarch.actor import (
    Actor,
    Future,
    attach_to_workers,
    current_rank,
    enable_transport,
    endpoint,
    run_worker_loop_until_shutdown,
    this_proc,
)
from ranks import BACKSTOP, SERVER, options, say, start, together, wait_for_all
from regression import Options, ParameterServer, train

from ddp_hpc import ConnectedWorld, DdpHpcError
from ddp_hpc.discovery.network_interfaces import local_address_towards
from ddp_hpc.rendezvous.listener import open_listener

_EXAMPLES = """\b
Examples:
  pip install torchmonarch
  mpiexec -n 3 python docs/examples/rpc/with_monarch.py
  srun --ntasks=3 python docs/examples/rpc/with_monarch.py --steps 1000
"""
_ANYONE = "trust_all_connections"  # the only choice that Monarch offers for TCP


class Server(Actor):
    """The parameter server as an actor, whose handle can be passed to other actors, like an RRef."""

    def __init__(self, options: Options, num_trainers: int) -> None:
        self._server = ParameterServer(options, num_trainers)

    @endpoint
    def pull(self) -> torch.Tensor:
        """Returns a copy of the parameters as a vector (21,)."""
        return self._server.pull()

    @endpoint
    def push(self, gradient: torch.Tensor) -> None:
        """Runs one step of the optimizer."""
        self._server.push(gradient)

    @endpoint
    def result(self) -> dict[str, float]:
        """Returns the result of the server."""
        return self._server.result()


class Trainer(Actor):
    """A trainer as an actor, in a child process of a rank, which Monarch starts."""

    def __init__(self, options: Options, server: Server, num_trainers: int) -> None:
        self._options, self._server, self._share = options, server, (current_rank().rank, num_trainers)

    @endpoint
    def train(self) -> None:
        """Runs all steps of this trainer."""
        server, limit_s = self._server, BACKSTOP * self._options.hang_timeout_s
        train(
            self._options,
            self._share,
            lambda: server.pull.call_one().get(timeout=limit_s),
            lambda gradient: server.push.call_one(gradient).get(timeout=limit_s),
        )


def address_of(world: ConnectedWorld) -> str:
    """Returns an address on which the worker of this rank can listen, and which other ranks can reach."""
    host = world.group.host
    with open_listener([0]) as free:
        port = free.getsockname()[1]
    return f"tcp://{host if world.rank == SERVER else local_address_towards(host, port)}:{port}"


def direct(options: Options, workers: list[str]) -> dict[str, float]:
    """Runs the server on rank 0, controls all trainers as one mesh, and returns the result.

    Raises:
        DdpHpcError: the process of a trainer died or hangs.
    """
    limit_s = options.hang_timeout_s
    # If a process dies, the futures raise an error. The default hook would end this process silently.
    monarch.actor.unhandled_fault_hook = lambda _: None
    hosts = attach_to_workers(ca=_ANYONE, workers=workers)
    server = this_proc().spawn("server", Server, options, len(workers))
    processes = hosts.spawn_procs(per_host={"processes": 1})
    trainers = processes.spawn("trainers", Trainer, options, server, len(workers))
    try:
        training, seen = trainers.train.call(), -1.0
        while not _is_done(training, limit_s):
            before, seen = seen, server.result.call_one().get(timeout=limit_s)["num_updates"]
            if seen == before:
                raise DdpHpcError(f"no trainer has sent a gradient for {limit_s:g} s (--hang-timeout-s)")
        result: dict[str, float] = server.result.call_one().get(timeout=limit_s)
        hosts.shutdown().get(timeout=limit_s)
    except RuntimeError as error:
        raise DdpHpcError(f"Monarch lost a trainer: {error}") from None
    return result


def _is_done(training: Future[Any], timeout_s: float) -> bool:
    try:
        training.get(timeout=timeout_s)
    except TimeoutError:
        return False
    return True


@click.command(epilog=_EXAMPLES)
@options
def main(**given: Any) -> None:
    """Train with asynchronous SGD on actors of Monarch: rank 0 keeps the parameters, all others train."""
    options = Options(**given)
    # The child processes that Monarch starts must also be able to import modules from this directory.
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    with together(options) as world:
        addresses = world.group.comm.allgather(address_of(world))
        if world.rank == SERVER:
            enable_transport(addresses[SERVER])
            say(direct(options, addresses[1:]))
        else:
            run_worker_loop_until_shutdown(address=addresses[world.rank], ca=_ANYONE)
        wait_for_all(world)


if __name__ == "__main__":
    start(main)
