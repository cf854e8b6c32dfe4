"""Signals while a file is written: they leave no hidden file behind."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

WRITER = "data_gen"


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
def end_by_signal(linger_s: float = 0.0) -> Iterator[None]:
    """Let SIGTERM and SIGHUP unwind the stack first, then end the process as they would have.

    `linger_s` is slept before that: a launcher kills the other ranks when the first one ends.
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
        for signum in ours:
            signal.signal(signum, signal.SIG_DFL)
        if stopped_by:
            time.sleep(linger_s)
            os.kill(os.getpid(), stopped_by[0])
