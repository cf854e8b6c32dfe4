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
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_hpc.discovery.launcher_environment import peek_rank, without_exec_variables
from ddp_hpc.discovery.open_files import raise_file_limit
from ddp_hpc.discovery.watchdog import time_limit
from ddp_hpc.discovery.world import World, discover, short_hostname
from ddp_hpc.rendezvous.connect_ranks import Endpoint, endpoint_of_one_rank, rendezvous
from ddp_hpc.rendezvous.end_with_parent import end_with_parent
from ddp_hpc.training.input.host_memory import prepare_host_memory
from ddp_hpc.training.process_group.config import ProcessGroupConfig
from ddp_hpc.training.process_group.kernel_caches import keep_kernels_private
from ddp_hpc.training.run.end import end_after_lost_rank, end_before_kill, fail, on_signal
from ddp_hpc.training.run.parts import Parts

if TYPE_CHECKING:
    from ddp_hpc.training.health.heartbeat import Heartbeat
    from ddp_hpc.training.process_group.group import Group
    from ddp_hpc.training.telemetry.progress_bar import Progress


# Time limit for a rank to save its state and stop after torchrun's agent was killed.
_AFTER_AGENT_S = 30.0


@contextmanager
def session(
    config: ProcessGroupConfig, parts: Parts, *, devices_per_rank: int = 1, cpu_offload: bool = False
) -> Iterator[Group]:
    """Connects the ranks that the launcher started. Collective: every rank must call this.

    An error here or in the body of the `with` ends this process and the whole job; one rank reports its
    error. The objects that are needed to end the run are stored in `parts`; the body adds others.
    """
    _prepare_process(parts)
    try:
        world, endpoint = _rendezvous(config, parts)
        from ddp_hpc.training.process_group.group import connect, connected_group

        link = None
        if endpoint is not None:
            link = connect(world, endpoint, config, parts.wait_for_snapshot)
            parts.watch = link.watch
            parts.watch.begin()
        with connected_group(
            world, link, config, devices_per_rank=devices_per_rank, cpu_offload=cpu_offload
        ) as group:
            yield group
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
    end_before_kill(parts, "torchrun's agent on this node was killed, and this rank did not stop in time")


def _rendezvous(config: ProcessGroupConfig, parts: Parts) -> tuple[World, Endpoint | None]:
    """Returns the world and its endpoint, within --init-timeout. Collective: every rank must call this."""
    environ = without_exec_variables(os.environ)
    prefix = f"[rank {peek_rank(environ)} {short_hostname()}] "
    # This limit expires after those of discovery and rendezvous, whose errors can name the missing ranks.
    with time_limit(config.init_timeout_s + 15.0, prefix) as watchdog:
        watchdog.stage("in MPI_Init for the other ranks: one of them did not start, or has ended")
        parts.world = world = discover(environ, config.discovery)
        if world.world_size == 1 and config.single_rank_group:
            return world, endpoint_of_one_rank()
        return world, rendezvous(world, environ, config.init_timeout_s, watchdog)


def introduce(group: Group, progress: Progress) -> None:
    """Prints the numbers of ranks and nodes, the checks of their placement, and notes on rank 0."""
    progress.say(f"world: {group.placement}")
    for line in group.checked:
        progress.say(line)
    for note in (*group.world.notes, *group.notes):
        progress.say(f"note: {note}")


def stacks_of_run() -> Path | None:
    """Returns the directory for the stack traces of hanging ranks; None without a run directory."""
    run = os.environ.get("DDP_HPC_RUN_DIR", "")
    return Path(run) / "stacks" if run else None


def start_watching(
    hang_timeout_s: float, timeout_s: float, group: Group, parts: Parts, stacks: Path | None
) -> Heartbeat:
    """Starts the heartbeat, which ends the job if a rank is lost or hangs. Collective."""
    from ddp_hpc.training.health.heartbeat import start_heartbeat

    parts.heartbeat = start_heartbeat(
        group.world,
        group.comm,
        group.host,
        group.listen,
        stuck_s=hang_timeout_s,
        first_s=max(timeout_s, hang_timeout_s),
        stacks=stacks,
        on_lost=partial(end_after_lost_rank, parts),
        relay=group.store.relay if group.store is not None else None,
    )
    return parts.heartbeat
