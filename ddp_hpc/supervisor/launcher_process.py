"""Starts the launcher, forwards signals to its ranks, and waits for its end."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from ddp_hpc import process_control
from ddp_hpc.errors import RequestError

_WATCH_S = 30.0
# A busy controller must not delay the end of the job.
_SEND_LIMIT_S = 10.0
# scancel does not reach the ranks before srun has created its step.
_STEP_STARTS_S = 3.0
# The time in which ranks without a launcher can save their state.
_ORPHANS_S = 10.0
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
# SIGCONT is not handled: Slurm sends it after other signals.
_HANDLED = {*_FORWARDED, signal.SIGCHLD}


@dataclass(frozen=True)
class LauncherEnd:
    """How the launcher ended. Times are in seconds since the Unix epoch."""

    code: int
    """The exit code as a shell reports it: 128 + N if signal N ended the launcher."""
    stopped_s: float | None
    """The time of the last SIGTERM or SIGINT that this process received; None if it received none."""
    was_signalled_early: bool
    """Whether the `EarlySignal` was sent."""


@dataclass(frozen=True)
class EarlySignal:
    """A signal that is sent to the ranks at `at_s`, in seconds since the Unix epoch."""

    at_s: float
    name: str


def run_launcher(
    argv: Sequence[str],
    environ: Mapping[str, str],
    *,
    forwards_term: str,
    is_over: Callable[[], bool],
    early: EarlySignal | None,
) -> LauncherEnd:
    """Runs the launcher until it ends, and returns how it ended. The handled signals stay blocked.

    `forwards_term` is a command that sends a signal to the ranks. Without it, the launcher gets SIGTERM.
    `is_over` is called every 30 s. If it returns True, the launcher is terminated.

    Raises:
        RequestError: the launcher cannot be started.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)
    process_control.adopt_orphans()
    try:
        process = subprocess.Popen(
            argv, env=dict(environ), stdin=subprocess.DEVNULL, preexec_fn=_prepare_launcher
        )
    except OSError as error:
        raise RequestError(
            f"cannot start {argv[0]} ({error.strerror}); check the launch command in the job script"
        ) from None
    stopped_s: float | None = None
    was_signalled_early = False
    begin_s = time.monotonic()
    watch_s = begin_s + _WATCH_S

    def send(name: str) -> None:
        if forwards_term:
            time.sleep(max(0.0, begin_s + _STEP_STARTS_S - time.monotonic()))
        _send(process, name, forwards_term)

    while process.poll() is None:
        wait_s = max(0.0, watch_s - time.monotonic())
        if early is not None:
            wait_s = min(wait_s, max(0.0, early.at_s - time.time()))
        received = signal.sigtimedwait(_HANDLED, wait_s)
        if received is not None and received.si_signo in _FORWARDED:
            name = "USR1" if received.si_signo == signal.SIGUSR1 else "TERM"
            if name == "TERM":
                stopped_s = time.time()
            send(name)
        if early is not None and time.time() >= early.at_s:
            send(early.name)
            early, was_signalled_early = None, True
        if time.monotonic() >= watch_s:
            watch_s = time.monotonic() + _WATCH_S
            if is_over():
                process.terminate()
    if signal.SIGTERM in signal.sigpending():  # the signal arrived after the launcher had ended
        stopped_s = time.time()
    code = process.returncode
    _end_orphans()
    return LauncherEnd(code if code >= 0 else 128 - code, stopped_s, was_signalled_early)


def _prepare_launcher() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED)
    # Some PBS servers leave ranks running when the job's script is killed. These ranks would prevent the next
    # job from running.
    process_control.die_with_parent(signal.SIGTERM)


def _end_orphans() -> None:
    """Ends ranks that are still running on this node after the launcher has ended, for example because it was
    killed. These ranks would keep the run directory in use, so the next job of the run could not start.
    """
    orphans = process_control.descendants(os.getpid())
    process_control.send(signal.SIGTERM, orphans)
    killed = process_control.end_descendants(_ORPHANS_S) if orphans else []
    if killed:
        line = f"warning: killed after the end of the launcher: {', '.join(sorted(killed))[:400]}\n"
        with suppress(OSError):
            os.write(2, line.encode("utf-8", "replace"))
    process_control.reap()


def _send(process: subprocess.Popen[bytes], name: str, forwards_term: str) -> None:
    if forwards_term:
        with suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(
                shlex.split(forwards_term.format(signal=name)),
                stdin=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=_SEND_LIMIT_S,
                check=False,
            )
    else:
        process.terminate()  # not every launcher forwards SIGUSR1 to the ranks
