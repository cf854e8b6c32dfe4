"""The ranks' command line and their common world: the part that all examples here share."""

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
from ddp_hpc.discovery.launcher_environment import peek_rank
from ddp_hpc.errors import EXIT_INTERRUPTED
from ddp_hpc.rendezvous.store_comm import StoreComm

SERVER = 0  # the rank that holds the parameters; all others train
BACKSTOP = 2  # calls wait so many times longer than the heartbeat, which knows who hangs
_FOREVER_S = 365 * 86400.0

_COUNT, _SECONDS = click.IntRange(min=1), click.FloatRange(min=1.0)
_OPTIONS: tuple[tuple[str, click.ParamType, float, str], ...] = (
    ("--steps", _COUNT, 200, "Gradients that each trainer sends."),
    ("--batch-size", _COUNT, 32, "Samples of one gradient."),
    ("--lr", click.FloatRange(min=0, min_open=True), 0.02, "The server's learning rate."),
    ("--seed", click.IntRange(min=0), 0, "Of the data and the parameters."),
    ("--init-timeout-s", _SECONDS, 120.0, "Seconds for all ranks to find each other."),
    ("--hang-timeout-s", _SECONDS, 60.0, "Seconds without any progress after which the job is ended."),
)


def options(command: Callable[..., None]) -> Callable[..., None]:
    """The options of all examples."""
    for name, kind, default, text in reversed(_OPTIONS):
        command = click.option(name, type=kind, default=default, show_default=True, help=text)(command)
    return command


@contextmanager
def together(options: Options) -> Iterator[ddp_hpc.ConnectedWorld]:
    """The ranks, connected. Where one fails, dies or hangs, all end with its one line.

    Collective: every rank must call this.

    Raises:
        RequestError: one rank alone was started.
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
                "there is 1 rank; one serves and the others train: start at least 2, as mpiexec -n 3 does"
            )
        yield world


def share(world: ddp_hpc.ConnectedWorld) -> tuple[int, int]:
    """Number of this trainer, and how many there are."""
    return world.rank - 1, world.world_size - 1


def at(world: ddp_hpc.ConnectedWorld) -> Callable[[int], None]:
    """What a trainer calls in each step, for the heartbeat: a server's main thread only waits."""
    return lambda step: world.at(step, "forward")


def wait_for_all(world: ddp_hpc.ConnectedWorld) -> None:
    """Returns when all have come, however long the slowest trains; the server comes when all have trained.

    Collective: every rank must call this.
    """
    if world.parts.heartbeat is not None:
        world.parts.heartbeat.rest()
    comm = world.group.comm
    if world.rank != SERVER and isinstance(comm, StoreComm):
        comm.timeout_s = _FOREVER_S  # the heartbeat tells when the server is gone
    world.barrier()


@contextmanager
def server_may_be_lost() -> Iterator[None]:
    """What gloo and TensorPipe say of a peer that is gone, in many words, as one line for all trainers.

    Raises:
        DdpHpcError: the server is gone or does not answer.
    """
    try:
        yield
    except RuntimeError as error:
        if not any(name in str(error) for name in ("gloo", "tensorpipe")):
            raise  # of the server's code, or the trainer's
        raise ddp_hpc.DdpHpcError(
            f"lost the server, rank {SERVER}: it is gone or does not answer; look there for its own error"
        ) from None


def say(result: dict[str, float]) -> None:
    """The product, one JSON object, on stdout."""
    print(json.dumps(result), flush=True)


def start(command: click.Command) -> NoReturn:
    """Runs the command; a wrong command line, which all ranks have, is told once."""
    try:
        command.main(standalone_mode=False)
        sys.exit(0)
    except click.ClickException as error:
        if peek_rank(os.environ) == 0:
            error.show()
        sys.exit(error.exit_code)
    except click.Abort:
        sys.exit(EXIT_INTERRUPTED)
