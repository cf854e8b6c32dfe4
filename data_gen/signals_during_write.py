"""Handles signals while a file is written, so that no hidden partial file is left."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

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
    """Lets SIGTERM and SIGHUP unwind the stack before they terminate the process, and remembers Ctrl-C.

    Python discards the exception of a handler that runs while an object is destroyed. The process then ends
    at the end of the block. It first waits for `others_are_done`, because launchers kill the other ranks when
    one exits.
    Signals for which the program, such as a trainer, has set a handler are not affected.
    """
    replaced: dict[signal.Signals, Any] = {}
    stopped_by: list[int] = []

    def stop(signum: int, _: FrameType | None) -> None:
        if not stopped_by:  # A second signal must not interrupt the cleanup.
            stopped_by.append(signum)
            raise KeyboardInterrupt if signum == signal.SIGINT else _Stopped

    try:
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
                if signal.getsignal(signum) in (signal.SIG_DFL, signal.default_int_handler):
                    replaced[signum] = signal.signal(signum, stop)
        yield
    finally:
        limit_s = time.monotonic() + _LINGER_S
        while stopped_by and not others_are_done() and time.monotonic() < limit_s:
            time.sleep(0.01)
        for signum, handler in replaced.items():
            signal.signal(signum, handler)
        if stopped_by:
            signal.raise_signal(stopped_by[0])
