"""Connects the processes that a launcher started, and ends them. Used by the training and by users' scripts.

torch is imported only after the ranks have found each other, so that an incorrect launch command fails within
a second.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_hpc.base.run_outcomes import Cause
from ddp_hpc.discovery.launcher_environment import peek_rank, without_exec_variables
from ddp_hpc.discovery.open_files import raise_file_limit
from ddp_hpc.discovery.rank_communication import SingleComm
from ddp_hpc.discovery.watchdog import time_limit
from ddp_hpc.discovery.world import World, discover, short_hostname
from ddp_hpc.rendezvous.connect_ranks import Endpoint, endpoint_of_one_rank, rendezvous
from ddp_hpc.rendezvous.end_with_parent import end_with_parent
from ddp_hpc.training.config import TrainConfig
from ddp_hpc.training.health.heartbeat import Heartbeat, start_heartbeat
from ddp_hpc.training.input.host_memory import prepare_host_memory
from ddp_hpc.training.process_group.config import ProcessGroupConfig
from ddp_hpc.training.process_group.kernel_caches import keep_kernels_private
from ddp_hpc.training.process_group.link import Link, connect
from ddp_hpc.training.process_group.start_phases import IMPORTING, PREPARING
from ddp_hpc.training.run.directories import find_run_directories
from ddp_hpc.training.run.end import end_after_lost_rank, end_before_kill, fail, on_signal
from ddp_hpc.training.run.parts import Parts

if TYPE_CHECKING:
    from ddp_hpc.training.process_group.group import Group
    from ddp_hpc.training.telemetry.progress import Progress


# Time limit for a rank to save its state and stop after torchrun's agent was killed.
_AFTER_AGENT_S = 30.0
# The time limit of a phase ends this much later than those of its parts, whose errors name the missing ranks.
AFTER_PARTS_S = 15.0


@dataclass(frozen=True, kw_only=True)
class Watching:
    """How the heartbeat watches the ranks.

    `hang_s` and `first_s` are the time limits for one position after the first step, and until its end.
    `stacks` is the directory for the stack traces of hanging ranks; None: none are written.
    """

    hang_s: float
    first_s: float
    stacks: Path | None


@contextmanager
def session(
    config: ProcessGroupConfig,
    parts: Parts,
    watching: Watching,
    *,
    devices_per_rank: int = 1,
    cpu_offload: bool = False,
) -> Iterator[tuple[Group, Heartbeat]]:
    """Connects the ranks that the launcher started. Collective: every rank must call this.

    The heartbeat has been started before torch is imported and the process group is connected, because NCCL
    waits without a time limit for a connection. It ends with the body of the `with`, or earlier if the body
    closes it.

    An error here or in the body ends this process and the whole job; one rank reports its error. The objects
    that are needed to end the run are stored in `parts`; the body adds others.
    """
    _prepare_process(parts)
    try:
        world, endpoint = _rendezvous(config, parts)
        link = None
        if endpoint is not None:
            link = connect(world, endpoint, config, parts.wait_for_snapshot)
            parts.watch = link.watch
            parts.watch.begin()
        heartbeat = parts.heartbeat = _start_heartbeat(world, link, config, watching, parts)
        heartbeat.prepare(IMPORTING)
        from ddp_hpc.training.process_group.group import connected_group

        with connected_group(
            world,
            link,
            config,
            heartbeat.prepare,
            devices_per_rank=devices_per_rank,
            cpu_offload=cpu_offload,
        ) as group:
            heartbeat.prepare(PREPARING)
            if link is None:
                heartbeat.rest()  # no other rank waits, and a process may create its data for hours
            yield group, heartbeat
            heartbeat.close()
    except BaseException as error:  # every error of a run is handled here
        fail(error, parts, config.timeout_s)


def _prepare_process(parts: Parts) -> None:
    for sig in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(sig, on_signal)
    sys.unraisablehook = _without_exits(sys.unraisablehook)
    if "TORCHELASTIC_RUN_ID" in without_exec_variables(os.environ):
        # When torchrun is killed, it leaves its ranks running.
        agent = os.getppid()
        end_with_parent(agent)
        threading.Thread(target=_end_after_agent, args=(agent, parts), daemon=True).start()
    if not faulthandler.is_enabled():
        with suppress(OSError, RuntimeError, AttributeError):  # stderr may be closed or belong to a notebook
            # Prints the stack trace on SIGBUS, which is raised if a memory-mapped file was truncated.
            faulthandler.enable()
    # Without this, c10d logs a warning with C++ frames for each connection that a failing rank closes.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    raise_file_limit()
    prepare_host_memory()
    keep_kernels_private(os.environ, short_hostname())


def _without_exits(
    hook: Callable[[sys.UnraisableHookArgs], object],
) -> Callable[[sys.UnraisableHookArgs], object]:
    """Wraps a hook so that it does not print the exit that `on_signal` requests.

    If a signal arrives while another error ends a loop, Python raises the exit in the generator that it
    closes, and would print a traceback for it (seen with torch 2.8 and 2.11).
    """

    def handle(unraisable: sys.UnraisableHookArgs) -> None:
        if not isinstance(unraisable.exc_value, SystemExit):
            hook(unraisable)

    return handle


def _end_after_agent(agent: int, parts: Parts) -> None:
    """Waits until torchrun's agent has exited, and then ends this rank if it does not stop in time."""
    while os.getppid() == agent:
        time.sleep(1.0)
    time.sleep(_AFTER_AGENT_S)
    what = "torchrun's agent on this node was killed, and this rank did not stop in time"
    end_before_kill(parts, what, Cause.LOST_RANK)


def _rendezvous(config: ProcessGroupConfig, parts: Parts) -> tuple[World, Endpoint | None]:
    """Returns the world and its endpoint, within --init-timeout. Collective: every rank must call this."""
    environ = without_exec_variables(os.environ)
    prefix = f"[rank {peek_rank(environ)} {short_hostname()}] "
    with time_limit(config.init_timeout_s + AFTER_PARTS_S, prefix) as watchdog:
        watchdog.stage("in MPI_Init for the other ranks: one of them did not start, or has ended")
        parts.world = world = discover(environ, config.discovery)
        if world.world_size == 1 and config.single_rank_group:
            return world, endpoint_of_one_rank()
        return world, rendezvous(world, environ, config.init_timeout_s, watchdog)


def introduce(group: Group, heartbeat: Heartbeat, progress: Progress) -> None:
    """Prints the numbers of ranks and nodes, the checks of their placement, and notes on rank 0."""
    progress.say(f"world: {group.placement}")
    for line in group.checked:
        progress.say(line)
    for note in filter(None, (*group.world.notes, *group.notes, heartbeat.note)):
        progress.say(f"note: {note}")


def watching_of(config: TrainConfig) -> Watching:
    """Returns how the heartbeat watches a training with these options."""
    hang_s = config.health.hang_timeout_s
    directories = find_run_directories(config, os.environ)
    return Watching(
        hang_s=hang_s,
        first_s=max(config.process_group.timeout_s, hang_s),
        stacks=None if directories is None else directories.stacks,
    )


def _start_heartbeat(
    world: World, link: Link | None, config: ProcessGroupConfig, watching: Watching, parts: Parts
) -> Heartbeat:
    """Starts the heartbeat, which ends the job if a rank is lost or hangs. Collective."""
    return start_heartbeat(
        world,
        SingleComm() if link is None else link.comm,
        "" if link is None else link.endpoint.host,
        "" if link is None else link.endpoint.listen,
        hang_s=watching.hang_s,
        first_s=watching.first_s,
        connect_s=config.init_timeout_s + AFTER_PARTS_S,
        stacks=watching.stacks,
        on_lost=partial(end_after_lost_rank, parts),
    )
