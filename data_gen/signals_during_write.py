"""Handles signals while a file is written, so that no hidden partial file is left."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

WRITER = "data_gen"

# This is less than a scheduler's time between SIGTERM and SIGKILL, which is 10 s in PBS and 30 s in Slurm.
_LINGER_S = 8.0


@contextmanager
def signals_held() -> Iterator[None]:
    """Defers signals to the end of the `with` block.

    While h5py closes a file, a signal handler's exception can be raised in a destructor, which discards it.
    """
    received: list[int] = []
    before = {}
    if threading.current_thread() is threading.main_thread():
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # None means a handler that was not set by Python and cannot be restored.
            if signal.getsignal(signum) is not None:
                before[signum] = signal.signal(signum, lambda number, _: received.append(number))
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
        for number in received:
            signal.raise_signal(number)


class _Stopped(BaseException):
    """Raised for a signal whose default action would have terminated the process."""


@contextmanager
def end_by_signal(others_are_done: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Lets SIGTERM and SIGHUP unwind the stack before they terminate the process.

    The process first waits for `others_are_done`, because launchers kill the other ranks when one exits.
    Signals for which the program, such as a trainer, has set a handler are not affected.
    """
    handled: list[signal.Signals] = []
    stopped_by: list[int] = []

    def stop(signum: int, _: FrameType | None) -> None:
        if not stopped_by:  # A second signal must not interrupt the cleanup.
            stopped_by.append(signum)
            raise _Stopped

    try:
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(signum) is signal.SIG_DFL:
                    handled.append(signum)
                    signal.signal(signum, stop)
        yield
    finally:
        limit_s = time.monotonic() + _LINGER_S
        while stopped_by and not others_are_done() and time.monotonic() < limit_s:
            time.sleep(0.01)
        for signum in handled:
            signal.signal(signum, signal.SIG_DFL)
        if stopped_by:
            os.kill(os.getpid(), stopped_by[0])
