"""Who the ranks are, where they meet, and how they end together: the part that all examples here share."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import click
from regression import Options

from ddp_hpc.errors import EXIT_FAILED, EXIT_INTERRUPTED, DdpHpcError, ReportedElsewhereError, RequestError
from ddp_hpc.training.claim import Claim
from ddp_hpc.training.config import TrainConfig
from ddp_hpc.training.group import Link, connect, joined
from ddp_hpc.training.heartbeat import Heartbeat, start_heartbeat
from ddp_hpc.world.comm import Comm, abort_mpi, finalize_mpi
from ddp_hpc.world.launch_env import peek_rank
from ddp_hpc.world.once import say_once_a_node
from ddp_hpc.world.rendezvous import rendezvous
from ddp_hpc.world.topology import World, discover, short_hostname
from ddp_hpc.world.watchdog import time_limit

SERVER = 0  # the rank that holds the parameters; all others train
_GONE_S = 2.0  # for a rank with better words to speak first
_FOREVER_S = 365 * 86400.0  # what is dead or does not move, the heartbeat finds

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


@dataclass(frozen=True)
class Ranks:
    """The ranks, connected; torch's default process group is there too, gloo on CPUs."""

    world: World
    comm: Comm
    link: Link
    heart: Heartbeat
    steps: int

    @property
    def share(self) -> tuple[int, int]:
        """Number of this trainer, and how many there are."""
        return self.world.rank - 1, self.world.world_size - 1

    def at(self, step: int) -> None:
        """The main thread of this trainer begins this step."""
        self.heart.at(step, "forward")

    def not_behind(self) -> None:
        """The main thread is there, and no trainer waits for it: to be called again and again."""
        self.heart.at(self.steps, "serving")


@contextmanager
def together(options: Options, stuck_s: float | None = None) -> Iterator[Ranks]:
    """Connects the ranks, and parts when all have come to the end of the block.

    Collective: every rank must call this. A rank that fails, dies, or does not move for `stuck_s`
    (by default `options.hang_timeout_s`) ends all others with one line on stderr and exit code 1, under
    any launcher; such a block is never left. Exit code 2: the request was wrong, nothing was started.
    """
    end = _End(options.hang_timeout_s)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(EXIT_FAILED))
    config = TrainConfig(
        backend="gloo", device="cpu", init_timeout_s=options.init_timeout_s, timeout_s=options.hang_timeout_s
    )
    try:
        prefix = f"[rank {peek_rank(os.environ)} {short_hostname()}] "
        with time_limit(config.init_timeout_s + 15.0, prefix) as watchdog:
            watchdog.stage("in MPI_Init for the other ranks: one of them did not start, or ended before it")
            world = end.world = discover(dict(os.environ))
            endpoint = rendezvous(world, dict(os.environ), config.init_timeout_s, watchdog)
        if endpoint is None:
            raise RequestError(
                "there is 1 rank; one serves and the others train: start at least 2, as mpiexec -n 3 does"
            )
        link = end.link = connect(world, endpoint, config)
        with joined(world, link, config) as group:
            heart = end.heart = start_heartbeat(
                world,
                group.comm,
                link.endpoint.host,
                stuck_s=stuck_s or options.hang_timeout_s,
                first_s=stuck_s or options.hang_timeout_s,
                stacks=None,
                on_lost=end.with_line,
                gone_s=_GONE_S,
            )
            link.comm.timeout_s = _FOREVER_S
            yield (ranks := Ranks(world, group.comm, link, heart, options.steps))
            ranks.not_behind()
            group.comm.barrier("the end of the training")
            heart.close()
    except BaseException as error:  # the one place where everything ends up
        end.with_error(error)
    finalize_mpi()


class _End:
    """What is known so far, for the words and the deeds of an end that was not planned."""

    def __init__(self, hang_timeout_s: float) -> None:
        self.world: World | None = None
        self.link: Link | None = None
        self.heart: Heartbeat | None = None
        self._hang_timeout_s = hang_timeout_s
        self._once = threading.Lock()

    def with_error(self, error: BaseException) -> NoReturn:
        late = isinstance(error, ReportedElsewhereError)
        if isinstance(error, DdpHpcError):
            self._leave(str(error), error.exit_code, late, error.everywhere)
        if isinstance(error, KeyboardInterrupt):
            self._leave("interrupted", EXIT_INTERRUPTED)
        first_line = str(error).strip().partition("\n")[0][:200]
        if isinstance(error, RuntimeError | TimeoutError):
            if self.heart is not None and (gone := self.heart.who_is_gone()):
                self.with_line(f"{gone} is gone: look there for its own error, and for what killed it")
            if "time" in first_line:  # timeout, timed out
                limit = f"{self._hang_timeout_s:g} s (--hang-timeout-s)"
                self.with_line(f"no answer from another rank within {limit}: {first_line}")
        self.with_line("".join(traceback.format_exception(error)).rstrip())

    def with_line(self, text: str) -> NoReturn:
        self._leave(text, EXIT_FAILED)

    def _leave(self, text: str, code: int, late: bool = False, everywhere: bool = False) -> NoReturn:
        """Says it once for the whole job, and ends this process and the others."""
        self._once.acquire()  # for ever: the heartbeat's thread may come to this at the same time
        if self.heart is not None:
            self.heart.close()  # says goodbye, or the others would call this rank gone
        if late:
            claim = Claim.LATE
        elif self.world is not None and (everywhere or self.world.world_size == 1):
            claim = Claim.FIRST
        else:
            claim = self.link.watch.claim() if self.link is not None else Claim.ALONE
        if claim is Claim.ALONE:
            say_once_a_node(f"[{short_hostname()}] error: {text}", os.environ)
        elif claim is Claim.FIRST and self.world is not None:
            sys.stderr.write(f"{self.world.prefix}error: {text}\n")
            sys.stderr.flush()
        if everywhere:
            finalize_mpi()
        else:
            abort_mpi(code, patience_s=5.0 if claim is Claim.LATE else 0.0)
        os._exit(code)


def start(command: click.Command, argv: list[str] | None = None) -> NoReturn:
    """Runs the command; a wrong command line, which all ranks have, is told once."""
    try:
        command.main(args=argv, standalone_mode=False)
        sys.exit(0)
    except click.ClickException as error:
        if peek_rank(os.environ) == 0:
            error.show()
        sys.exit(error.exit_code)
    except click.Abort:
        sys.exit(EXIT_INTERRUPTED)


def say(result: dict[str, Any]) -> None:
    """The product, one JSON object, on stdout."""
    print(json.dumps(result), flush=True)  # noqa: T201
