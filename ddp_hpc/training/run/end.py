"""Ends a process whose run failed or stopped early: one line for the whole job, and the exit code.

What a process does depends on its role among the processes that end, see `ROLES`. The exit code and the
state of the run depend on the cause, see `run_outcomes.Cause`. This module does not import torch, because it
also handles errors that occur before torch is imported.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from dataclasses import dataclass, replace
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
from ddp_hpc.training.process_group.print_error import ErrorElection, print_error
from ddp_hpc.training.run.parts import Parts
from ddp_hpc.training.run.verdict import Verdict, verdict, with_traceback

_SAVING_S = 20.0


class Role(Enum):
    """What a process is among those that end."""

    TOGETHER = "all ranks have the same error at the same point, and none is stuck in a collective"
    WITH_RANK_0 = "like TOGETHER; rank 0 reports the error"
    FIRST = "the first rank that failed, or the only one"
    LATER = "another rank has already reported an error"
    WITHOUT_STORE = "no rank can ask the others, since the store is not available"
    UNCONNECTED = "like TOGETHER, before the ranks are connected"


@dataclass(frozen=True, kw_only=True)
class Ending:
    """What a process does before it ends."""

    prints: ErrorElection
    records: bool
    """Whether it records the end in the run directory."""
    saves: bool
    """Whether rank 0 completes the snapshot that it is writing, and the others wait for that."""
    leaves: Literal["together", "with the others"]
    """`together`: through MPI_Finalize. Otherwise, it aborts the other ranks, which may be stuck."""
    patience_s: float = 0.0
    """How long it waits before it aborts the others, one of which reports the error."""


_WON, _LOST, _NO_STORE = ErrorElection.WON, ErrorElection.LOST, ErrorElection.NO_STORE
ROLES = {
    Role.TOGETHER: Ending(prints=_WON, records=True, saves=True, leaves="together"),
    Role.WITH_RANK_0: Ending(prints=_LOST, records=False, saves=True, leaves="together"),
    Role.FIRST: Ending(prints=_WON, records=True, saves=True, leaves="with the others"),
    Role.LATER: Ending(prints=_LOST, records=False, saves=True, leaves="with the others", patience_s=5.0),
    Role.WITHOUT_STORE: Ending(prints=_NO_STORE, records=True, saves=False, leaves="with the others"),
    Role.UNCONNECTED: Ending(prints=_NO_STORE, records=True, saves=False, leaves="together"),
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

    The process ends with `os._exit`: a normal interpreter shutdown would call into threads and communicators
    whose peers may be gone.

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
    if ending.prints is not _LOST:
        text = with_traceback(text, what.traceback_text, parts)
    elif what.cause is Cause.SIGNALLED:
        code = EXIT_FAILED  # the failure watch of this process sent that signal
    print_error(ending.prints, text, parts.world)
    _save(ending, parts)
    if ending.records:
        _record(error, what, text, parts, step)
    _let_others_end(ending, parts)
    if ending.leaves == "together":
        if parts.watch is not None:
            parts.watch.close()
        finalize_mpi(then_exits=True)
        _leave(code)
    if parts.world is not None and parts.world.launcher == "torchrun" and ending.prints is not _LOST:
        _report_to_torchrun(text)
    # MPI_Finalize would wait for ranks that are stuck in a collective: abort them instead.
    abort_mpi(code, patience_s=ending.patience_s)
    _leave(code)


def end_before_kill(parts: Parts, text: str, cause: Cause = Cause.OUT_OF_TIME) -> NoReturn:
    """Ends this process shortly before SIGKILL. Called in a thread."""
    end = parts.own_end(cause, text)
    _end_from_thread(parts, end, _role(DdpHpcError(text), parts))


def end_after_lost_rank(parts: Parts, end: AttemptEnd) -> NoReturn:
    """Ends this process because the heartbeat has lost a rank. Called in its thread."""
    parts.has_lost_rank = True
    # If rank 0 is lost, so is the store, and the ranks cannot hold an election.
    role = _role(DdpHpcError(end.reason), parts) if _is_rank_0(parts) else Role.WITHOUT_STORE
    _end_from_thread(parts, end, role)


def _end_from_thread(parts: Parts, end: AttemptEnd, role: Role) -> NoReturn:
    """Ends this process although the main thread may never return from a collective."""
    ending = ROLES[role]
    print_error(ending.prints, end.reason, parts.world)
    parts.record_end(end)
    _save(ending, parts)
    _let_others_end(ending, parts)
    # Several ranks can fail at once, and the one that reports the error must not be aborted before that.
    abort_mpi(end.exit_code, patience_s=min(ending.patience_s, _PATIENCE_OF_THREADS_S))
    _leave(end.exit_code)


def _record(error: BaseException, what: Verdict, text: str, parts: Parts, step: int | None) -> None:
    """Records that this error has ended the attempt."""
    has_begun = parts.record is not None and parts.record.has_begun
    # A request that turns out to be wrong later is a failure of the run.
    cause = Cause.FAILED if what.cause is Cause.REFUSED and has_begun else what.cause
    end = parts.own_end(cause, _reason(text))
    parts.record_end(replace(end, exit_code=what.exit_code, step=step, exception=type(error).__name__))


def _role(error: BaseException, parts: Parts) -> Role:
    """Returns the role of this process. If several ranks fail, an election decides which is the first."""
    if isinstance(error, ReportedElsewhereError):
        # Before the ranks are connected, some of them may be missing.
        return Role.LATER if parts.watch is None else Role.WITH_RANK_0
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


def _save(ending: Ending, parts: Parts) -> None:
    """Completes the snapshot on rank 0, and waits for that on the others."""
    if ending.saves and (parts.is_alone or _is_rank_0(parts)):
        parts.wait_for_snapshot(_SAVING_S)
    elif ending.saves and parts.watch is not None:
        parts.watch.let_rank_0_save()


def _let_others_end(ending: Ending, parts: Parts) -> None:
    """Tells the ranks that wait in `_save` to end. Launchers can kill rank 0 when the first of them exits."""
    if ending.saves and parts.watch is not None and _is_rank_0(parts):
        parts.watch.let_rank_0_save()


def _is_rank_0(parts: Parts) -> bool:
    return parts.world is not None and parts.world.rank == 0


def _end_alone(error: BaseException, what: Verdict, parts: Parts, step: int | None) -> NoReturn:
    text = with_traceback(what.text, what.traceback_text, parts)
    _record(error, what, text, parts, step)
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
