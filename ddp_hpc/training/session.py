"""From a started process to connected ranks, and back: what the training and people's own scripts share.

torch is imported only when the ranks have found each other: a wrong launch ends in under a second.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_hpc.training.config import TrainConfig
from ddp_hpc.training.ending import Parts, fail, on_signal
from ddp_hpc.training.host_memory import prepare_host_memory
from ddp_hpc.world.launch_env import peek_rank
from ddp_hpc.world.rendezvous import Endpoint, rendezvous
from ddp_hpc.world.topology import World, discover, short_hostname
from ddp_hpc.world.watchdog import time_limit

if TYPE_CHECKING:
    from ddp_hpc.training.group import Group
    from ddp_hpc.training.heartbeat import Heartbeat
    from ddp_hpc.training.progress import Progress


@contextmanager
def session(config: TrainConfig, parts: Parts) -> Iterator[Group]:
    """The ranks that the launcher started, connected. Collective: every rank must call this.

    What goes wrong here or in the body ends the process and the whole job, with one rank's words.
    `parts` gets what is made here; the body adds to it what its end has to know.
    """
    _prepare_process()
    try:
        parts.world, endpoint = world, _ = _find_the_others(config)
        from ddp_hpc.training.group import connect, joined

        link = connect(world, endpoint, config) if endpoint is not None else None
        parts.watch = link.watch if link is not None else None
        with joined(world, link, config) as group:
            yield group
    except BaseException as error:  # the one place where everything ends up
        fail(error, parts, config.timeout_s)


def _prepare_process() -> None:
    for sig in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(sig, on_signal)
    if not faulthandler.is_enabled():
        with suppress(OSError, RuntimeError, AttributeError):  # stderr may be closed, or a notebook's
            faulthandler.enable()  # says where, if a data file is cut under the memory map (SIGBUS)
    # c10d warns, with C++ frames, of every connection that a failing rank drops, and of hosts without DNS.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    prepare_host_memory()


def _find_the_others(config: TrainConfig) -> tuple[World, Endpoint | None]:
    """The world and its meeting place, within --init-timeout. Collective: every rank must call this."""
    environ = dict(os.environ)
    prefix = f"[rank {peek_rank(environ)} {short_hostname()}] "
    # The inner limits are to end first: they can name who is missing.
    with time_limit(config.init_timeout_s + 15.0, prefix) as watchdog:
        watchdog.stage("in MPI_Init for the other ranks: one of them did not start, or ended before it")
        world = discover(environ, config.discovery)
        return world, rendezvous(world, environ, config.init_timeout_s, watchdog)


def introduce(group: Group, progress: Progress) -> None:
    """Rank 0 tells where the ranks run, and what is to be known of it."""
    progress.say(f"world: {group.placement}")
    for line in group.checked:
        progress.say(line)
    for note in group.world.notes:
        progress.say(f"note: {note}")


def stacks_of_run() -> Path | None:
    """The folder for stacks of ranks that hang, where a job script names a run folder."""
    run = os.environ.get("DDP_HPC_RUN_DIR", "")
    return Path(run) / "stacks" if run else None


def start_watching(config: TrainConfig, group: Group, parts: Parts, stacks: Path | None) -> Heartbeat:
    """The ranks' heartbeat, which ends the job where one of them is lost or hangs. Collective."""
    from ddp_hpc.training.heartbeat import start_heartbeat

    parts.heart = start_heartbeat(
        group.world,
        group.comm,
        group.host,
        stuck_s=config.hang_timeout_s,
        first_s=max(config.timeout_s, config.hang_timeout_s),
        stacks=stacks,
        on_lost=parts.on_lost,
    )
    return parts.heart
