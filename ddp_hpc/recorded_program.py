"""Runs the program of one rank as a child process, and records in the run directory how it ended.

Launchers change or lose exit codes, so the supervisor of the job relies on these records; see
`ddp_hpc.rank_ends`.
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

from ddp_hpc import process_control, rank_ends
from ddp_hpc.discovery.separate_ranks import SeparateRanks
from ddp_hpc.discovery.world import short_hostname
from ddp_hpc.errors import EXIT_DONE, EXIT_FAILED, EXIT_REQUEUE, DdpHpcError
from ddp_hpc.rank_ends import RankEnd

_STOPS = frozenset((signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT))
_FORWARDED = _STOPS | {signal.SIGUSR1, signal.SIGUSR2}
_HANDLED = _FORWARDED | {signal.SIGCHLD}
WATCH_LIMIT_S = 300.0
"""How long the program is watched: importing torch can take several seconds, reading a model minutes."""
_POLL_S, _POLL_LATER_S, _LATER_S = 0.2, 2.0, 30.0


@dataclass(frozen=True, kw_only=True)
class Recording:
    """Where and as what the end of a rank is recorded; `attempt` is the value of DDP_HPC_THIS_ATTEMPT."""

    run_dir: Path
    attempt: str
    rank: int
    world_size: int


def watch_pause_s(ran_s: float) -> float:
    """Returns the pause before the next look at a program that has run for `ran_s`."""
    return _POLL_S if ran_s < _LATER_S else _POLL_LATER_S


def run_recorded(
    path: str,
    program: Sequence[str],
    environ: Mapping[str, str],
    recording: Recording,
    watch: SeparateRanks | None,
) -> int:
    """Runs a program until it ends, and returns its exit code; -N means that signal N has ended it.

    Signals are passed on to the program, and only to the program: its worker processes should survive until
    it has saved its state. `watch` is given on rank 0.

    Raises:
        OSError: the program cannot be started.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)
    if recording.rank == 0:
        _record_began(recording)
    # This process keeps the launcher's sockets open until the end is recorded: Hydra kills all ranks as soon
    # as the socket of one that has not called MPI_Finalize is closed.
    # Its own process group: many launchers send signals to whole groups, and it would get them twice.
    process = subprocess.Popen(
        program,
        executable=path,
        env=environ,
        close_fds=False,
        process_group=0,
        preexec_fn=_prepare_program,
    )
    was_stopped = _wait(process, watch)
    code = process.returncode
    if watch is not None and watch.warning and not was_stopped:
        _complain(f"warning: {watch.warning}")
    reason = watch.mpi if watch is not None and code == EXIT_DONE else ""
    _record_end(recording, code, reason, was_stopped=was_stopped)
    return code


def end_like(code: int) -> NoReturn:
    """Ends this process in the way in which the program ended; `code` is the result of `run_recorded`."""
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


def _wait(process: subprocess.Popen[bytes], watch: SeparateRanks | None) -> bool:
    """Waits for the end of the program, and returns whether it was stopped by a signal from outside."""
    was_stopped = False
    begin_s = time.monotonic()
    while process.poll() is None:
        ran_s = time.monotonic() - begin_s
        is_watched = watch is not None and not watch.is_settled and ran_s < WATCH_LIMIT_S
        if is_watched and watch is not None:
            watch.look(process.pid)
        # Without a limit, a signal that came before the program was started would be waited for.
        received = signal.sigtimedwait(_HANDLED, watch_pause_s(ran_s) if is_watched else _POLL_LATER_S)
        if received is not None and received.si_signo in _FORWARDED:
            was_stopped = was_stopped or received.si_signo in _STOPS
            process.send_signal(received.si_signo)
    return was_stopped


def _record_began(recording: Recording) -> None:
    try:
        rank_ends.write_began(recording.run_dir, recording.attempt)
    except DdpHpcError as error:  # the disk is full, for example
        _complain(f"warning: {error}")


def _record_end(recording: Recording, code: int, reason: str, *, was_stopped: bool) -> None:
    """Records how the program of this rank ended.

    A rank that ends after a signal from outside is not the cause of the end: the launcher sends the signal to
    all ranks when one has failed, and the scheduler at the end of the job.
    """
    exit_code = code if code >= 0 else 128 - code
    end = RankEnd(
        rank=recording.rank,
        world_size=recording.world_size,
        host=short_hostname(),
        exit_code=EXIT_FAILED if reason else exit_code,
        signal=max(0, -code),
        at_s=time.time(),
        reason=reason,
    )
    try:
        if reason or (code not in (EXIT_DONE, EXIT_REQUEUE) and not was_stopped):
            rank_ends.write_first_failure(recording.run_dir, recording.attempt, end)
        if recording.rank == 0:
            rank_ends.write_ended(recording.run_dir, recording.attempt, exit_code)
    except DdpHpcError as error:
        _complain(f"warning: {error}")


def _complain(text: str) -> None:
    os.write(2, f"[{short_hostname()}] {text}\n".encode())
