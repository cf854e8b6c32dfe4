"""Runs the launcher of `ddp-hpc launch` until it ends, and forwards signals to it."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from ddp_hpc.base import process_control
from ddp_hpc.base.errors import RequestError

_FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_GRACE_S = 10.0


def run_launcher(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Runs the launcher, and returns its exit code as a shell reports it: 128 + N if signal N ended it.

    The launcher is in a process group of its own, so that Ctrl-C does not reach the ranks: Python programs
    would print tracebacks, and Hydra would report a segmentation fault. The launcher gets SIGTERM instead,
    and after 10 s or a second Ctrl-C, all processes are killed.

    Raises:
        RequestError: the launcher cannot be started.
        KeyboardInterrupt: after Ctrl-C, when the launcher and its ranks on this machine have ended.
    """
    # An ignored signal, such as SIGHUP after nohup, remains ignored.
    candidates = (*_FORWARDED, signal.SIGINT)
    handled = {number for number in candidates if signal.getsignal(number) != signal.SIG_IGN}
    signal.pthread_sigmask(signal.SIG_BLOCK, {*handled, signal.SIGCHLD})
    process_control.adopt_orphans()
    process = _start(argv, environ, handled)
    kill_at_s = 0.0
    while process.poll() is None:
        is_late = kill_at_s and time.monotonic() > kill_at_s
        received = None if is_late else signal.sigtimedwait({*handled, signal.SIGCHLD}, 0.5)
        number = received.si_signo if received else 0
        if is_late or (number == signal.SIGINT and kill_at_s):
            break
        if number == signal.SIGINT:
            kill_at_s = time.monotonic() + _GRACE_S
            process.terminate()
        elif number in handled:
            process.send_signal(number)
    if kill_at_s:
        process_control.end_descendants(grace_s=0.0 if process.poll() is None else 1.0)
        process_control.reap()
        raise KeyboardInterrupt
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def _start(
    argv: Sequence[str], environ: Mapping[str, str], handled: set[signal.Signals]
) -> subprocess.Popen[bytes]:
    def prepare() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {*handled, signal.SIGCHLD})
        process_control.die_with_parent(signal.SIGTERM)

    # The terminal stops a process of another group that reads from it.
    is_terminal = os.isatty(0)
    try:
        process = subprocess.Popen(
            argv,
            env=dict(environ),
            stdin=subprocess.PIPE if is_terminal else None,
            process_group=0,
            preexec_fn=prepare,
        )
    except OSError as error:
        raise RequestError(
            f"cannot start {argv[0]}: {error.strerror}. Check that the file is an executable program."
        ) from None
    if process.stdin is not None:
        threading.Thread(target=_copy_terminal_to, args=(process.stdin.fileno(),), daemon=True).start()
    return process


def _copy_terminal_to(pipe: int) -> None:
    with suppress(OSError):  # the launcher has ended
        while chunk := os.read(0, 65536):
            os.write(pipe, chunk)
        os.close(pipe)
