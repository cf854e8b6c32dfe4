"""Starts processes that end together with their parent. Requires Linux: prctl(2)."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ddp_hpc.discovery.world import short_hostname

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # <linux/prctl.h>
_GRACE_S = 30.0  # as long as torchrun waits, because the ranks may be saving their state


def end_with_parent(parent: int) -> None:
    """Makes this process receive SIGTERM when its parent ends, or at once if the parent has already ended."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)


def run_guarded(body: Callable[[], object], what: str) -> int:
    """Runs `body` in a child process; if the child fails or is killed, its own children are ended too.

    If a signal kills the child, an error is printed that refers to the child as `what`.

    Returns the child's exit code, or 128 plus the signal's number. It does not return in the child.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # the child's orphans become this process's children
    sys.stdout.flush()
    guard, child = os.getpid(), os.fork()
    if child == 0:
        end_with_parent(guard)
        body()
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
        left = _descendants(os.getpid())
        for pid in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, sig)
        while left and time.monotonic() < end_s:
            time.sleep(0.1)
            with suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            left = _descendants(os.getpid())


def _descendants(pid: int) -> list[int]:
    """Returns all descendants of the process, from /proc (proc(5))."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError, ValueError, IndexError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if fields[0] not in "ZX":
                    parents[int(entry.name)] = int(fields[1])
    found, new = [], [pid]
    while new:
        new = [child for child, parent in parents.items() if parent in new]
        found += new
    return found


def _prctl(option: int, value: int) -> None:
    # A failure is ignored: then only the launcher ends the remaining processes.
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
