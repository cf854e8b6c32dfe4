"""The command line options of all examples in this directory, and the functions that connect their ranks."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

import click
from regression import Options

import ddp_hpc
from ddp_hpc.base.errors import EXIT_INTERRUPTED
from ddp_hpc.discovery.launcher_environment import peek_rank
from ddp_hpc.rendezvous.store_comm import StoreComm

SERVER = 0  # the rank that keeps the parameters; all other ranks train
# The time limit of remote calls is twice that of the heartbeat, so that the heartbeat reports a hang first.
BACKSTOP = 2
_FOREVER_S = 365 * 86400.0

_COUNT, _SECONDS = click.IntRange(min=1), click.FloatRange(min=1.0)
_OPTIONS: tuple[tuple[str, click.ParamType, float, str], ...] = (
    ("--steps", _COUNT, 200, "Number of gradients that each trainer sends."),
    ("--batch-size", _COUNT, 32, "Number of samples per gradient."),
    ("--lr", click.FloatRange(min=0, min_open=True), 0.02, "Learning rate of the server."),
    ("--seed", click.IntRange(min=0), 0, "Seed of the data and the parameters."),
    ("--init-timeout-s", _SECONDS, 120.0, "Seconds until all ranks must be connected."),
    ("--hang-timeout-s", _SECONDS, 60.0, "Seconds without progress after which the job is aborted."),
)


def options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options of all examples to a command."""
    for name, kind, default, text in reversed(_OPTIONS):
        command = click.option(name, type=kind, default=default, show_default=True, help=text)(command)
    return command


@contextmanager
def together(options: Options) -> Iterator[ddp_hpc.ConnectedWorld]:
    """Connects the ranks. If a rank fails, is killed or hangs, all ranks end with a one-line error.

    Collective: every rank must call this.

    Raises:
        RequestError: only one rank was started.
    """
    with ddp_hpc.distributed(
        backend="gloo",
        device="cpu",
        init_timeout_s=options.init_timeout_s,
        timeout_s=BACKSTOP * options.hang_timeout_s,
        hang_timeout_s=options.hang_timeout_s,
    ) as world:
        if world.world_size == 1:
            raise ddp_hpc.RequestError(
                "there is only one rank, but a server and at least one trainer are needed; start at least 2 "
                "ranks, for example with mpiexec -n 3"
            )
        yield world


def share(world: ddp_hpc.ConnectedWorld) -> tuple[int, int]:
    """Returns the index of this trainer, and the number of trainers."""
    return world.rank - 1, world.world_size - 1


def at(world: ddp_hpc.ConnectedWorld) -> Callable[[int], None]:
    """Returns a function that the trainer must call in each step, so that the heartbeat sees its progress."""
    return lambda step: world.at(step, "forward")


def wait_for_all(world: ddp_hpc.ConnectedWorld) -> None:
    """Waits for all ranks without a time limit. The server calls this when all trainers have finished.

    Collective: every rank must call this.
    """
    if world.parts.heartbeat is not None:
        world.parts.heartbeat.rest()
    comm = world.group.comm
    if world.rank != SERVER and isinstance(comm, StoreComm):
        comm.timeout_s = _FOREVER_S  # no time limit is needed, since the heartbeat reports a dead server
    world.barrier()


@contextmanager
def server_may_be_lost() -> Iterator[None]:
    """Replaces the long errors of gloo and TensorPipe about a closed connection with one line.

    Raises:
        DdpHpcError: the server has died or does not respond.
    """
    try:
        yield
    except RuntimeError as error:
        if not any(name in str(error) for name in ("gloo", "tensorpipe")):
            raise  # not a closed connection, but an error in the code of the server or the trainer
        raise ddp_hpc.DdpHpcError(
            f"lost the server: rank {SERVER} is gone or does not respond; look for its own error message"
        ) from None


def say(result: dict[str, float]) -> None:
    """Prints the result as one JSON object on stdout."""
    print(json.dumps(result), flush=True)


def start(command: click.Command) -> NoReturn:
    """Runs the command. An invalid option is an error on all ranks, but only rank 0 prints it."""
    try:
        command.main(standalone_mode=False)
        sys.exit(0)
    except click.ClickException as error:
        if peek_rank(os.environ) == 0:
            error.show()
        sys.exit(error.exit_code)
    except click.Abort:
        sys.exit(EXIT_INTERRUPTED)
