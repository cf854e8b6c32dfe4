"""Signals while a file is written: they leave no hidden file behind."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

WRITER = "data_gen"

# Below the time that schedulers leave between SIGTERM and SIGKILL: PBS 10 s, Slurm 30 s.
_LINGER_S = 8.0


@contextmanager
def signals_held() -> Iterator[None]:
    """Let signals wait for the end of the block.

    While h5py closes a file, an exception of a handler is soon in one of its destructors, and lost.
    """
    came: list[int] = []
    before = {}
    if threading.current_thread() is threading.main_thread():
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(signum) is not None:  # None: not Python's, it cannot be set again
                before[signum] = signal.signal(signum, lambda number, _: came.append(number))
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
        for number in came:
            signal.raise_signal(number)


class _Stopped(BaseException):
    """A signal that would have ended the process at once."""


@contextmanager
def end_by_signal(others_are_done: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Let SIGTERM and SIGHUP unwind the stack first, then end the process as they would have.

    Before that `others_are_done` is waited for: launchers kill the other ranks when the first one ends.
    A handler that the program has set keeps the signal: a trainer's flag decides there.
    """
    ours: list[signal.Signals] = []
    stopped_by: list[int] = []

    def stop(signum: int, _: FrameType | None) -> None:
        if not stopped_by:  # A second signal must not interrupt the cleaning up.
            stopped_by.append(signum)
            raise _Stopped

    try:
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(signum) is signal.SIG_DFL:
                    ours.append(signum)
                    signal.signal(signum, stop)
        yield
    finally:
        limit_s = time.monotonic() + _LINGER_S
        while stopped_by and not others_are_done() and time.monotonic() < limit_s:
            time.sleep(0.01)
        for signum in ours:
            signal.signal(signum, signal.SIG_DFL)
        if stopped_by:
            os.kill(os.getpid(), stopped_by[0])
