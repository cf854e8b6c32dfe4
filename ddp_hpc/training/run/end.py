"""Ends a process whose run failed or stopped early: one line for the whole job, and the exit code.

What a process does depends on its role among the processes that end, see `ROLES`. The exit code and the
state of the run depend on the cause, see `run_outcomes.Cause`.
This module does not import torch, because it also handles
errors that occur before torch is imported.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Literal, NoReturn

from ddp_hpc.base.attempt_end import AttemptEnd
from ddp_hpc.base.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_REQUEUE,
    DdpHpcError,
    ReportedElsewhereError,
)
from ddp_hpc.base.process_control import STOP_SIGNALS
from ddp_hpc.base.run_outcomes import Cause
from ddp_hpc.discovery.rank_communication import abort_mpi, finalize_mpi
from ddp_hpc.discovery.world import World
from ddp_hpc.training.health.heartbeat_messages import Loss
from ddp_hpc.training.process_group.print_error import ErrorElection, print_error
from ddp_hpc.training.run.parts import Parts
from ddp_hpc.training.run.verdict import Verdict, verdict, with_traceback

_SAVING_S = 20.0


class Role(Enum):
    """What a process is among those that end."""

    TOGETHER = "all ranks have the same error at the same point, and none is stuck in a collective"
    FIRST = "the first rank that failed, or the only one"
    LATER = "another rank has already reported an error"
    WITHOUT_STORE = "no rank can ask the others, since the store is not available"
    UNCONNECTED = "like TOGETHER, before the ranks are connected"


@dataclass(frozen=True, kw_only=True)
class Ending:
    """What a process does before it ends. The snapshot is the one that is being written at the time."""

    prints: ErrorElection
    records: bool
    """Whether it records the end in the run directory."""
    waits_for: Literal["its own snapshot", "the snapshot of rank 0", "nothing"]
    leaves: Literal["together", "with the others"]
    """`together`: through MPI_Finalize. Otherwise, it aborts the other ranks, which may be stuck."""
    patience_s: float = 0.0
    """How long it waits before it aborts the others, one of which reports the error."""


ROLES = {
    Role.TOGETHER: Ending(
        prints=ErrorElection.WON, records=True, waits_for="its own snapshot", leaves="together"
    ),
    Role.FIRST: Ending(
        prints=ErrorElection.WON, records=True, waits_for="the snapshot of rank 0", leaves="with the others"
    ),
    Role.LATER: Ending(
        prints=ErrorElection.LOST,
        records=False,
        waits_for="the snapshot of rank 0",
        leaves="with the others",
        patience_s=5.0,
    ),
    Role.WITHOUT_STORE: Ending(
        prints=ErrorElection.NO_STORE, records=True, waits_for="nothing", leaves="with the others"
    ),
    Role.UNCONNECTED: Ending(
        prints=ErrorElection.NO_STORE, records=True, waits_for="nothing", leaves="together"
    ),
}
# The thread of the heartbeat or of the last resort ends a process in less time.
_PATIENCE_OF_THREADS_S = 1.0


def on_signal(signum: int, frame: object) -> NoReturn:
    """Handles signals until the training installs its own signal handlers."""
    del frame
    # Raise an exception, so that a partially written data file is removed.
    raise SystemExit(128 + signum)


def end_stopped(world: World) -> NoReturn:
    """Ends a process whose run stopped early on purpose, with its state saved. Collective.

    Not for torchrun, which restarts ranks that exit with a code other than 0.
    """
    _ignore_signals()
    finalize_mpi(then_exits=True)
    # Launchers return the largest exit code, or the bitwise OR of all exit codes. Rank 0 exits last: its exit
    # code may make the launcher kill all other ranks, which have then already exited.
    _leave(EXIT_REQUEUE if world.rank == 0 else EXIT_DONE)


def fail(error: BaseException, parts: Parts, timeout_s: float) -> NoReturn:
    """Reports the error once for the whole job, and ends the other ranks.

    The process ends with `os._exit`: a normal interpreter shutdown would call into
    threads and communicators whose peers may be gone.

    Raises:
        BaseException: the error itself, if a user's script runs as a single process, because it may be a
            test or a notebook. Errors of this package are raised as SystemExit.
    """
    _ignore_signals()
    # torch's SIGCHLD handler raises an error in the main thread when a worker of --workers ends.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    what = verdict(error, parts, timeout_s)
    step = parts.step()
    if parts.heartbeat is not None:
        parts.heartbeat.close()  # otherwise, the other ranks would report that this rank is lost
    if parts.in_script and parts.is_alone:
        _end_alone(error, what, parts, step)
    role = _role(error, parts)
    ending, text, code = ROLES[role], what.text, what.exit_code
    if role is not Role.LATER:
        text = with_traceback(text, what.traceback_text, parts)
    elif what.cause is Cause.SIGNALLED:
        code = EXIT_FAILED  # the failure watch of this process sent that signal
    print_error(ending.prints, text, parts.world)
    _wait_for_snapshot(ending, parts)
    if ending.records:
        parts.record_end(_end_of(error, what, text, parts, step))
    if ending.leaves == "together":
        if parts.watch is not None:
            parts.watch.close()
        finalize_mpi(then_exits=True)
        _leave(code)
    if parts.world is not None and parts.world.launcher == "torchrun" and role is not Role.LATER:
        _report_to_torchrun(text)
    # MPI_Finalize would wait for ranks that are stuck in a collective: abort them instead.
    abort_mpi(code, patience_s=ending.patience_s)
    _leave(code)


def end_before_kill(parts: Parts, text: str) -> NoReturn:
    """Ends this process shortly before SIGKILL. Called in a thread."""
    world = parts.world
    end = AttemptEnd(
        cause=Cause.OUT_OF_TIME,
        exit_code=Cause.OUT_OF_TIME.exit_code,
        reason=parts.reword(text),
        rank=None if world is None else world.rank,
        host="" if world is None else world.hostname,
        step=parts.step(),
    )
    _end_from_thread(parts, end, _role(DdpHpcError(text), parts))


def end_after_lost_rank(parts: Parts, loss: Loss) -> NoReturn:
    """Ends this process because the heartbeat has lost a rank. Called in its thread."""
    parts.has_lost_rank = True
    end = AttemptEnd(
        cause=loss.cause,
        exit_code=loss.cause.exit_code,
        reason=parts.reword(loss.text),
        rank=loss.rank,
        host=loss.host,
        step=loss.step,
    )
    # If rank 0 is lost, so is the store, and the ranks cannot hold an election.
    is_rank_0 = parts.world is not None and parts.world.rank == 0
    role = _role(DdpHpcError(loss.text), parts) if is_rank_0 else Role.WITHOUT_STORE
    _end_from_thread(parts, end, role)


def _end_from_thread(parts: Parts, end: AttemptEnd, role: Role) -> NoReturn:
    """Ends this process although the main thread may never return from a collective."""
    ending = ROLES[role]
    print_error(ending.prints, end.reason, parts.world)
    parts.record_end(end)
    _let_rank_0_save(ending, parts)
    # Several ranks can fail at once, and the one that reports the error must not be aborted before that.
    abort_mpi(end.exit_code, patience_s=min(ending.patience_s, _PATIENCE_OF_THREADS_S))
    _leave(end.exit_code)


def _end_of(error: BaseException, what: Verdict, text: str, parts: Parts, step: int | None) -> AttemptEnd:
    """Returns the record of an end with this error on this rank."""
    world = parts.world
    has_begun = parts.record is not None and parts.record.has_begun
    # A request that turns out to be wrong later is a failure of the run.
    cause = Cause.FAILED if what.cause is Cause.REFUSED and has_begun else what.cause
    return AttemptEnd(
        cause=cause,
        exit_code=what.exit_code,
        reason=_reason(text),
        rank=None if world is None else world.rank,
        host="" if world is None else world.hostname,
        step=step,
        exception=type(error).__name__,
    )


def _role(error: BaseException, parts: Parts) -> Role:
    """Returns the role of this process. If several ranks fail, an election decides which is the first."""
    if isinstance(error, ReportedElsewhereError):
        return Role.LATER
    is_together = isinstance(error, DdpHpcError) and error.on_all_ranks
    if parts.world is None:
        return Role.UNCONNECTED if is_together else Role.WITHOUT_STORE
    if is_together:
        return Role.TOGETHER
    if parts.world.world_size == 1:
        return Role.FIRST
    if parts.watch is None:
        return Role.WITHOUT_STORE
    results = {
        ErrorElection.WON: Role.FIRST,
        ErrorElection.LOST: Role.LATER,
        ErrorElection.NO_STORE: Role.WITHOUT_STORE,
    }
    return results[parts.watch.run_election()]


def _let_rank_0_save(ending: Ending, parts: Parts) -> bool:
    """Waits for the snapshot of rank 0; returns False if this process does not wait for it."""
    if parts.watch is None or ending.waits_for != "the snapshot of rank 0":
        return False
    parts.watch.let_rank_0_save()
    return True


def _wait_for_snapshot(ending: Ending, parts: Parts) -> None:
    if _let_rank_0_save(ending, parts):
        return
    if ending.waits_for == "its own snapshot" or parts.is_alone:
        parts.wait_for_snapshot(_SAVING_S)


def _end_alone(error: BaseException, what: Verdict, parts: Parts, step: int | None) -> NoReturn:
    text = with_traceback(what.text, what.traceback_text, parts)
    parts.record_end(_end_of(error, what, text, parts, step))
    if isinstance(error, DdpHpcError):
        print_error(ErrorElection.WON, text, parts.world)
        raise SystemExit(what.exit_code) from error
    raise error


def _reason(text: str) -> str:
    """Returns the error message: the last line of a traceback, or the first line of any other text."""
    lines = text.splitlines()
    return lines[-1] if lines[0].startswith("Traceback") else lines[0].removeprefix("error: ")


def _ignore_signals() -> None:
    """Ignores further signals: Slurm sends SIGTERM twice at the time limit, and scripts forward SIGUSR1."""
    for sig in STOP_SIGNALS:
        signal.signal(sig, signal.SIG_IGN)


def _report_to_torchrun(text: str) -> None:
    """Writes the error to the file that torchrun's agent reads to report the root cause."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE", ""):
        # The format is that of ProcessFailure in torch.distributed.elastic.multiprocessing.errors. The
        # traceback is written to a separate file.
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps({"message": text, "timestamp": int(time.time())}), "utf-8")


def _leave(code: int) -> NoReturn:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stdout.flush()
    os._exit(code)
