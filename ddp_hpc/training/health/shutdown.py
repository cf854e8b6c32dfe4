"""Ends a run that failed or stopped early: prints one line for the whole job and sets the exit code.

This module does not import torch, because it also handles errors that occur before torch is imported.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from ddp_hpc.discovery.launcher_environment import present_launchers
from ddp_hpc.discovery.print_once_per_node import print_once_per_node
from ddp_hpc.discovery.rank_communication import abort_mpi, finalize_mpi
from ddp_hpc.discovery.world import World, short_hostname
from ddp_hpc.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_REQUEUE,
    EXIT_WRONG_REQUEST,
    DdpHpcError,
    RendezvousError,
    ReportedElsewhereError,
)
from ddp_hpc.log_message import log_message
from ddp_hpc.training.health.error_election import ErrorElection
from ddp_hpc.training.health.preemption import SIGNALS
from ddp_hpc.user_code_exceptions import (
    describe_error,
    is_from_this_package,
    traceback_of,
    write_traceback,
)

if TYPE_CHECKING:
    from ddp_hpc.training.health.failure_watch import FailureWatch
    from ddp_hpc.training.health.heartbeat import Heartbeat
    from ddp_hpc.training.health.run_lifecycle import RunLifecycle

_SIGTERM_EXIT = 128 + signal.SIGTERM
_SAVING_S = 20.0


@dataclass
class Parts:
    """The objects that are needed to end a run; None for those that have not been created yet."""

    world: World | None = None
    watch: FailureWatch | None = None
    heartbeat: Heartbeat | None = None
    lifecycle: RunLifecycle | None = None
    in_script: bool = False
    """Whether the process runs a user's script. If it is the only rank, it then ends like any program."""
    reword: Callable[[str], str] = str
    """Changes messages of this package before they are printed, for example the names of options."""

    has_lost_rank: bool = False
    """Whether the heartbeat has lost a rank."""

    @property
    def is_alone(self) -> bool:
        """Returns whether this process is the only rank, as far as is known."""
        return self.world.world_size == 1 if self.world is not None else not present_launchers(os.environ)

    def end_before_kill(self, text: str) -> NoReturn:
        """Ends this process shortly before SIGKILL. Called in a thread."""
        self._end_from_thread(text, _elect(DdpHpcError(text), self, together=False))

    def on_lost(self, text: str) -> NoReturn:
        """Ends this process because the heartbeat has lost a rank. Called in its thread."""
        self.has_lost_rank = True
        # If rank 0 is lost, so is the store, and the ranks cannot hold an election.
        is_rank_0 = self.world is not None and self.world.rank == 0
        election = _elect(DdpHpcError(text), self, together=False) if is_rank_0 else ErrorElection.NO_STORE
        self._end_from_thread(text, election)

    def finish_writing(self, limit_s: float) -> None:
        """Waits for the snapshot that is being written, at most `limit_s`."""
        if self.lifecycle is not None:
            self.lifecycle.finish_writing(limit_s, self._has_lost_rank)

    def _has_lost_rank(self) -> bool:
        return self.has_lost_rank or (self.heartbeat is not None and bool(self.heartbeat.gone_ranks(0.0)))

    def is_lost(self) -> bool:
        """Returns whether another rank failed, in which case this rank ends without a message."""
        return self.watch is not None and self.watch.has_failed_rank

    def _end_from_thread(self, text: str, election: ErrorElection) -> NoReturn:
        """Ends this process although the main thread may never return from a collective."""
        text = self.reword(text)
        print_error(election, text, self.world)
        if self.lifecycle is not None:
            self.lifecycle.failed(text, again=True)
        if self.watch is not None and election is not ErrorElection.NO_STORE:
            self.watch.let_rank_0_save()
        # Several ranks can fail at once, and the one that reports the error must not be aborted before that.
        abort_mpi(EXIT_FAILED, patience_s=1.0 if election is ErrorElection.LOST else 0.0)
        _leave(EXIT_FAILED)


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
    code, text = verdict(error, parts, timeout_s)
    traceback_text = _traceback_text(error, parts, timeout_s)
    if parts.heartbeat is not None:
        parts.heartbeat.close()  # otherwise, the other ranks would report that this rank is lost
    together = isinstance(error, DdpHpcError) and error.on_all_ranks
    if parts.in_script and parts.is_alone:
        _end_alone(error, parts, code, _with_traceback(text, traceback_text, parts))
    election = _elect(error, parts, together)
    if election is ErrorElection.LOST and code == _SIGTERM_EXIT:
        code = EXIT_FAILED  # the failure watch of this process sent that signal
    if election is not ErrorElection.LOST:
        text = _with_traceback(text, traceback_text, parts)
    print_error(election, text, parts.world)
    if parts.watch is not None and election is not ErrorElection.NO_STORE and not together:
        parts.watch.let_rank_0_save()
    elif together or parts.is_alone:
        parts.finish_writing(_SAVING_S)
    if parts.lifecycle is not None and election is not ErrorElection.LOST and code == EXIT_FAILED:
        parts.lifecycle.failed(_reason(text), again=_is_lost_contact(error, timeout_s))
    if parts.lifecycle is not None and code == EXIT_WRONG_REQUEST:
        parts.lifecycle.refused()
    if together:
        # All ranks have reached this point, so none of them is stuck in a collective.
        if parts.watch is not None:
            parts.watch.close()
        finalize_mpi(then_exits=True)
        _leave(code)
    if parts.world is not None and parts.world.launcher == "torchrun" and election is not ErrorElection.LOST:
        _report_to_torchrun(text)
    # MPI_Finalize would wait for ranks that are stuck in a collective: abort them instead.
    abort_mpi(code, patience_s=5.0 if election is ErrorElection.LOST else 0.0)
    _leave(code)


def _end_alone(error: BaseException, parts: Parts, code: int, text: str) -> NoReturn:
    if parts.lifecycle is not None and code == EXIT_FAILED:
        parts.lifecycle.failed(_reason(text), again=False)
    if isinstance(error, DdpHpcError):
        print_error(ErrorElection.WON, text, parts.world)
        raise SystemExit(code) from error
    raise error


def _reason(text: str) -> str:
    """Returns the error message: the last line of a traceback, or the first line of any other text."""
    lines = text.splitlines()
    return lines[-1] if lines[0].startswith("Traceback") else lines[0].removeprefix("error: ")


def print_error(election: ErrorElection, text: str, world: World | None) -> None:
    """Prints the error as one line; a traceback is printed unchanged, without a label."""
    line = text if "\n" in text else f"error: {text}"
    if election is ErrorElection.NO_STORE:
        print_once_per_node(f"[{short_hostname()}] {line}", os.environ)
    elif election is ErrorElection.WON:
        prefix = world.prefix if world is not None and world.world_size > 1 else ""
        if log_message(f"{prefix}{line}"):
            return
        # One write, so that lines of different ranks do not mix. Errors such as a full disk are ignored.
        with contextlib.suppress(OSError, AttributeError):
            sys.stderr.write(f"{prefix}{line}\n")
            sys.stderr.flush()


def verdict(error: BaseException, parts: Parts, timeout_s: float) -> tuple[int, str]:
    """Returns the exit code and the message for an error."""
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else EXIT_FAILED
        if code - 128 in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            name = signal.Signals(code - 128).name
            return code, f"stopped by {name} (scancel, qdel, the time limit, or the launcher)"
        if isinstance(error.code, str):  # sys.exit("message") has exit code 1
            return EXIT_FAILED, error.code
        return code, f"a rank called sys.exit with exit code {code}"
    if isinstance(error, KeyboardInterrupt):
        return EXIT_INTERRUPTED, "interrupted"
    if "is killed by signal: Terminated" in str(error):
        # A worker process (--workers) received the SIGTERM of the job shortly before this process.
        return verdict(SystemExit(_SIGTERM_EXIT), parts, timeout_s)
    if isinstance(error, DdpHpcError):
        text = parts.reword(str(error)) if is_from_this_package(error) else str(error)
        return error.exit_code, _at(error, text, whole=False) if error.traceback_text else text
    if text := _known_error(error, parts, timeout_s):
        return EXIT_FAILED, text
    if parts.in_script:
        return EXIT_FAILED, traceback_of(_without_context_managers(error)).rstrip()
    return EXIT_FAILED, _at(error, describe_error(error), whole=True)


def _elect(error: BaseException, parts: Parts, together: bool) -> ErrorElection:
    """Decides whether this rank reports the error: only one of several failing ranks does."""
    if isinstance(error, ReportedElsewhereError):
        return ErrorElection.LOST
    if parts.world is None:
        return ErrorElection.NO_STORE
    if together or parts.world.world_size == 1:
        return ErrorElection.WON
    return parts.watch.run_election() if parts.watch is not None else ErrorElection.NO_STORE


def _known_error(error: BaseException, parts: Parts, timeout_s: float) -> str:
    """Describes an exception that the exit of another process has caused, in one line; empty for all other
    exceptions.
    """
    if "ddp_hpc.training.input.batch_loader" in sys.modules:
        from ddp_hpc.training.input.batch_loader import explain_lost_worker

        if text := explain_lost_worker(error):
            return text
    if parts.watch is not None:
        from ddp_hpc.training.health.failure_watch import explain_lost_contact

        if text := explain_lost_contact(error, timeout_s):
            gone = parts.heartbeat.gone_ranks() if parts.heartbeat is not None else ""
            return f"{gone} is gone: {text}" if gone else text
    return ""


def _at(error: BaseException, text: str, *, whole: bool) -> str:
    """Prepends the notes that the loop added to the error: the step and, if `whole`, the samples."""
    notes = getattr(error, "__notes__", [])
    where = ", ".join(notes if whole else notes[:1])
    return f"{where}: {text}" if where else text


def _traceback_text(error: BaseException, parts: Parts, timeout_s: float) -> str:
    """Returns the traceback to write to a file for an unexpected exception, a bug here or in user code."""
    if isinstance(error, DdpHpcError):
        return error.traceback_text
    if parts.in_script or not isinstance(error, Exception) or _known_error(error, parts, timeout_s):
        return ""
    return traceback_of(_without_context_managers(error))


def _with_traceback(text: str, traceback_text: str, parts: Parts) -> str:
    """Appends the name of the traceback's file; appends the traceback itself if it cannot be written."""
    if not traceback_text:
        return text
    run = os.environ.get("DDP_HPC_RUN_DIR", "")
    directory = parts.lifecycle.tracebacks if parts.lifecycle is not None else None
    directory = directory or (Path(run) / "tracebacks" if run else None)
    rank = parts.world.rank if parts.world is not None else 0
    try:
        path = write_traceback(traceback_text, directory, f"rank{rank:05d}.txt")
    except OSError as error:
        return f"error: {text}; cannot write its traceback ({error.strerror}):\n{traceback_text.rstrip()}"
    return f"{text}; the traceback is in {path}"


def _without_context_managers(error: BaseException) -> BaseException:
    """Removes the context managers around the body of the `with` from the traceback of the error."""
    inner = error.__traceback__
    while inner is not None and inner.tb_frame.f_code.co_flags & inspect.CO_GENERATOR:
        inner = inner.tb_next
    return error.with_traceback(inner or error.__traceback__)


def _is_lost_contact(error: BaseException, timeout_s: float) -> bool:
    if "torch" not in sys.modules:
        return False
    from ddp_hpc.training.health.failure_watch import explain_lost_contact

    return isinstance(error, RendezvousError) or bool(explain_lost_contact(error, timeout_s))


def _ignore_signals() -> None:
    """Ignores further signals: Slurm sends SIGTERM twice at the time limit, and scripts forward SIGUSR1."""
    for sig in SIGNALS:
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
