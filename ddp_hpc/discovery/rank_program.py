"""Runs the program of one rank as a child process, which it watches, and records how it ended.

Launchers change or lose exit codes, so the supervisor of a job relies on the records in the run directory
(see `attempt_end`). Slurm kills what remains of a job step when its ranks have ended, so only a rank itself
can print a warning at the end of its program.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from ddp_hpc.base import attempt_end, process_control, timeline
from ddp_hpc.base.attempt_end import AttemptEnd
from ddp_hpc.base.errors import EXIT_DONE, EXIT_FAILED, EXIT_REQUEUE, DdpHpcError
from ddp_hpc.base.run_outcomes import Cause
from ddp_hpc.base.user_code_exceptions import TRACEBACKS, write_traceback
from ddp_hpc.discovery.rank_output import RankOutput
from ddp_hpc.discovery.separate_ranks import SeparateRanks
from ddp_hpc.discovery.silent_rank import RankWatch
from ddp_hpc.discovery.world import short_hostname

_STOPS = frozenset((signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT))
_FORWARDED = _STOPS | {signal.SIGUSR1, signal.SIGUSR2}
_HANDLED = _FORWARDED | {signal.SIGCHLD}
# Importing torch can take several seconds, and reading a model minutes.
_WATCH_LIMIT_S = 300.0
_SI_KERNEL = 0x80  # siginfo.h; a process that sends a signal has another code
_POLL_S, _POLL_LATER_S, _LATER_S = 0.2, 2.0, 30.0


@dataclass(frozen=True, kw_only=True)
class Recording:
    """Where and as what the end of a rank is recorded; `attempt` is the value of DDP_HPC_THIS_ATTEMPT."""

    run_dir: Path
    attempt: str
    rank: int


def run_as_child(
    path: str,
    program: Sequence[str],
    environ: Mapping[str, str],
    recording: Recording | None,
    watch: SeparateRanks | None,
    output: RankOutput | None = None,
    silence: RankWatch | None = None,
) -> int:
    """Runs a program until it ends, and returns its exit code; -N means that signal N has ended it.

    Signals are passed on to the program, and only to the program: its worker processes should survive until
    it has saved its state. `watch` is given on rank 0 of several, `recording` in a job with a supervisor,
    `output` if the ranks have logs of their own, and `silence`, which needs `output`, with --idle-timeout.

    Raises:
        OSError: the program cannot be started.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)
    if recording is not None and recording.rank == 0:
        _record_began(recording)
    # This process keeps the launcher's sockets open until the end is recorded: Hydra kills all ranks as soon
    # as the socket of one that has not called MPI_Finalize is closed.
    # The program has its own process group, because many launchers send signals to whole groups, and it would
    # get them twice. However, only the foreground group of a terminal can read from the terminal.
    is_terminal = os.isatty(0)
    for part in (output, silence):
        environ = environ if part is None else part.environ(environ)
    process = subprocess.Popen(
        program,
        executable=path,
        env=environ,
        stdout=None if output is None else output.stdout,
        stderr=None if output is None else output.stderr,
        close_fds=False,
        process_group=None if is_terminal else 0,
        preexec_fn=_prepare_program,
    )
    if output is not None:
        output.begin()
        if silence is not None:
            silence.begin(process.pid, lambda: output.num_bytes)
    was_stopped = _wait(process, watch, silence, has_terminal=is_terminal)
    code = process.returncode
    if silence is not None:
        silence.end()
    if output is not None:
        output.end()
    reason = watch.mpi if watch is not None and code == EXIT_DONE else ""
    if recording is not None:
        _record_end(recording, code, reason, output, was_stopped=was_stopped)
    return code


def end_like(code: int) -> NoReturn:
    """Ends this process in the way in which the program ended; `code` is the result of `run_as_child`."""
    sys.stdout.flush()
    sys.stderr.flush()
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the program has left the core file
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (-code,))
    os._exit(code if code >= 0 else 128 - code)


def _prepare_program() -> None:
    """Runs in the new process: it must not outlive this one, and gets signals that are blocked here."""
    process_control.die_with_parent(signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED)


def _wait(
    process: subprocess.Popen[bytes],
    watch: SeparateRanks | None,
    silence: RankWatch | None,
    *,
    has_terminal: bool,
) -> bool:
    """Waits for the end of the program, and returns whether it was stopped by a signal from outside.

    Prints the warning of `watch` after the time limit or, if nothing has stopped the program, at its end.
    With `has_terminal`, the signals of the terminal, such as Ctrl-C, reach the program directly. A program
    that has hung may be unable to handle a signal, and is killed.
    """
    was_stopped = False
    begin_s = time.monotonic()
    while process.poll() is None:
        ran_s = time.monotonic() - begin_s
        if watch is not None and not watch.is_settled:
            watch.look(process.pid)
        if watch is not None and (watch.is_settled or ran_s >= _WATCH_LIMIT_S):
            _warn(watch)
            watch = None
        # Without a limit, a signal that came before the program was started would be waited for.
        is_soon = watch is not None and ran_s < _LATER_S
        if was_stopped and silence is not None and silence.may_be_killed():
            process_control.send(signal.SIGKILL, process_control.descendants(os.getpid()))
        received = signal.sigtimedwait(_HANDLED, _POLL_S if is_soon else _POLL_LATER_S)
        if received is not None and received.si_signo in _FORWARDED:
            was_stopped = was_stopped or received.si_signo in _STOPS
            if not (has_terminal and received.si_code == _SI_KERNEL):
                process.send_signal(received.si_signo)
    if watch is not None and not was_stopped:
        _warn(watch)
    return was_stopped


def _warn(watch: SeparateRanks) -> None:
    if watch.warning:
        _complain(f"warning: {watch.warning}")


def _record_began(recording: Recording) -> None:
    try:
        attempt_end.write_began(recording.run_dir, recording.attempt)
        timeline.note(recording.run_dir, recording.attempt, timeline.Moment.PROGRAM_BEGAN)
    except DdpHpcError as error:  # the disk is full, for example
        _complain(f"warning: {error}")


def _record_end(
    recording: Recording, code: int, reason: str, output: RankOutput | None, *, was_stopped: bool
) -> None:
    """Records how the program of this rank ended, and the traceback of the first rank that failed.

    A rank that ends after a signal from outside is not the cause of the end: the launcher sends the signal to
    all ranks when one has failed, and the scheduler at the end of the job.
    """
    if attempt_end.is_replaced(recording.run_dir, recording.attempt):
        return
    exit_code = code if code >= 0 else 128 - code
    how = reason or (f"was killed by {_signal_name(-code)}" if code < 0 else f"exited with code {code}")
    # With another exit code, the program has handled its last exception.
    exception, traceback = output.failure if output is not None and code == EXIT_FAILED else ("", "")
    if exception:
        how += f": {exception}; its traceback is in {recording.run_dir / TRACEBACKS}"
    end = AttemptEnd(
        cause=Cause.LOST_RANK if code < 0 else Cause.EXITED,
        exit_code=EXIT_FAILED if reason else exit_code,
        reason=f"rank {recording.rank} on {short_hostname()} {how}",
        rank=recording.rank,
        host=short_hostname(),
        exception=exception.partition(":")[0].rpartition(".")[2],
    )
    try:
        has_failed = reason or (code not in (EXIT_DONE, EXIT_REQUEUE) and not was_stopped)
        is_first = has_failed and attempt_end.write_end(recording.run_dir, recording.attempt, end)
        if is_first and traceback:
            write_traceback(traceback, recording.run_dir, recording.rank)
        if recording.rank == 0:
            attempt_end.write_ended(recording.run_dir, recording.attempt, exit_code)
    except (DdpHpcError, OSError) as error:
        _complain(f"warning: {error}")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _complain(text: str) -> None:
    os.write(2, f"[{short_hostname()}] {text}\n".encode())
