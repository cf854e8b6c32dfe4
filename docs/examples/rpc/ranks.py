"""Who the ranks are, where they meet, and how they end together: the part that all examples here share."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
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
BACKSTOP = 2  # calls wait so many times longer than the heartbeat, which knows who hangs
_GONE_S = 2.0  # for a rank with better words to speak first
_PATIENCE_S = 15.0
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

    def wait_for_all(self) -> None:
        """Returns when all have come, however long that takes. Collective: every rank must call this."""
        self.not_behind()
        self.comm.barrier("the end of the training")


@contextmanager
def together(options: Options, stuck_s: float | None = None) -> Iterator[Ranks]:
    """Connects the ranks, and parts when all have come to the end of the block.

    Collective: every rank must call this. A rank that fails, dies, or does not move for `stuck_s`
    (by default `options.hang_timeout_s`) ends all others with one line on stderr and exit code 1, under
    any launcher; such a block is never left. Exit code 2: the request was wrong, nothing was started.
    """
    end = _End()
    signal.signal(signal.SIGTERM, _on_sigterm)
    config = TrainConfig(
        backend="gloo",
        device="cpu",
        init_timeout_s=options.init_timeout_s,
        timeout_s=BACKSTOP * options.hang_timeout_s,
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
                on_lost=end.lost,
                gone_s=_GONE_S,
            )
            if heart.note and world.rank == SERVER:
                sys.stderr.write(f"note: {heart.note}\n")
            link.comm.timeout_s = _FOREVER_S
            yield (ranks := Ranks(world, group.comm, link, heart, options.steps))
            ranks.wait_for_all()
            heart.close()
    except BaseException as error:  # the one place where everything ends up
        end.failed(error)
    finalize_mpi()


def _on_sigterm(*_: object) -> NoReturn:
    """The launcher's, the scheduler's, or that of another rank which failed and has said why."""
    if peek_rank(os.environ) == SERVER:
        time.sleep(1.0)  # the store is here: the others are to hear of it first
    os._exit(EXIT_FAILED)


class _End:
    """What is known so far, for the words and the deeds of an end that was not planned."""

    def __init__(self) -> None:
        self.world: World | None = None
        self.link: Link | None = None
        self.heart: Heartbeat | None = None
        self._once = threading.Lock()

    def lost(self, text: str) -> NoReturn:
        """What the heartbeat calls, in its thread. With rank 0 the store is lost: nobody can be asked."""
        is_rank_0 = self.world is not None and self.world.rank == 0
        self._leave(text, EXIT_FAILED, None if is_rank_0 else Claim.ALONE)

    def failed(self, error: BaseException) -> NoReturn:
        """What the main thread ends with."""
        if isinstance(error, DdpHpcError) and error.everywhere:  # all ranks are here: nobody waits
            late = isinstance(error, ReportedElsewhereError)
            self._leave(str(error), error.exit_code, Claim.LATE if late else Claim.FIRST, abort=False)
        if isinstance(error, DdpHpcError):
            alone = self.world is not None and self.world.world_size == 1
            self._leave(str(error), error.exit_code, Claim.FIRST if alone else None)
        if isinstance(error, KeyboardInterrupt):
            self._leave("interrupted", EXIT_INTERRUPTED)
        text = "".join(traceback.format_exception(error)).rstrip()
        if isinstance(error, RuntimeError | TimeoutError):  # all that gloo, TensorPipe and the store raise
            first_line = str(error).strip().partition("\n")[0][:200]
            if self.heart is not None and (gone := self.heart.who_is_gone()):
                text = f"{gone} is gone: look there for its own error, and for what killed it"
            elif "timeout" in first_line.lower() or "timed out" in first_line.lower():
                text = f"no answer from another rank (--hang-timeout-s tells when): {first_line}"
        self._leave(text, EXIT_FAILED)

    def _leave(self, text: str, code: int, claim: Claim | None = None, abort: bool = True) -> NoReturn:
        """Says it once for the whole job, and ends this process and the others."""
        self._once.acquire()  # for ever: both threads may come to this
        bail_out = threading.Timer(_PATIENCE_S, os._exit, [code])  # from a store that hangs with rank 0
        bail_out.daemon = True
        bail_out.start()
        if self.heart is not None:
            self.heart.close()  # says goodbye, or the others would call this rank gone
        if claim is None:
            claim = self.link.watch.claim() if self.link is not None else Claim.ALONE
        if claim is Claim.ALONE:
            say_once_a_node(f"[{short_hostname()}] error: {text}", os.environ)
        elif claim is Claim.FIRST and self.world is not None:
            sys.stderr.write(f"{self.world.prefix}error: {text}\n")
            sys.stderr.flush()
        if abort:
            abort_mpi(code, patience_s=5.0 if claim is Claim.LATE else 0.0)
        else:
            finalize_mpi()
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
    print(json.dumps(result), flush=True)
