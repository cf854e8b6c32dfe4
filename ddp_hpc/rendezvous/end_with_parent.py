"""Starts processes that end together with their parent. Requires Linux: prctl(2)."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable

from ddp_hpc.base.process_control import adopt_orphans, descendants, die_with_parent, reap, send
from ddp_hpc.discovery.world import short_hostname

_GRACE_S = 30.0  # as long as torchrun waits, because the ranks may be saving their state


def end_with_parent(parent: int) -> None:
    """Makes this process receive SIGTERM when its parent ends, or at once if the parent has already ended."""
    die_with_parent(signal.SIGTERM)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)


def keep_exit_code() -> None:
    """Makes this process ignore SIGTERM while it exits.

    When one task of a job step has failed, srun terminates the others. Python's finalization resets handlers
    of signals to the default action, so SIGTERM could kill a task that is about to exit with code 2. srun,
    which reports the largest exit code, would then report 143.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def run_guarded(body: Callable[[], object], what: str) -> int:
    """Runs `body` in a child process; if the child fails or is killed, its own children are ended too.

    If a signal kills the child, an error is printed that refers to the child as `what`.

    Returns the child's exit code, or 128 plus the signal's number. It does not return in the child.
    """
    adopt_orphans()
    sys.stdout.flush()
    guard, child = os.getpid(), os.fork()
    if child == 0:
        end_with_parent(guard)
        try:
            body()
        finally:
            keep_exit_code()
        sys.exit(0)
    # Ctrl-C and Slurm's signals reach the child directly.
    for sig in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(sig, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGTERM))
    while True:
        pid, status = os.wait()
        if pid == child:
            break
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        name = signal.Signals(-code).name
        sys.stderr.write(f"[{short_hostname()}] error: {what} was killed by {name}\n")
        sys.stderr.flush()
    if code != 0:
        _end_descendants()
    return code if code >= 0 else 128 - code


def _end_descendants() -> None:
    for sig, wait_s in ((signal.SIGTERM, _GRACE_S), (signal.SIGKILL, 1.0)):
        end_s = time.monotonic() + wait_s
        left = descendants(os.getpid())
        send(sig, left)
        while left and time.monotonic() < end_s:
            time.sleep(0.1)
            reap()
            left = descendants(os.getpid())
