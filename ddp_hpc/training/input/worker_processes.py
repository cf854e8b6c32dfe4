"""Reads with the worker processes of a DataLoader, and reports their exit where a batch is awaited."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import TypeVar

from ddp_hpc.base.errors import DdpHpcError
from ddp_hpc.base.option_names import named
from ddp_hpc.base.process_control import STOP_SIGNALS, die_with_parent
from ddp_hpc.data.samples import first_line
from ddp_hpc.training.process_group.errors_of_torch import explain_lost_worker

T = TypeVar("T")

# While the workers read a batch, this is the interval of checks for workers that have exited. It must be the
# `timeout` of the DataLoader.
CHECK_S = 1.0


@dataclass(frozen=True)
class WorkerProcesses:
    """The worker processes of a DataLoader whose `timeout` is CHECK_S and whose workers are prepared."""

    num: int
    source: str
    """What they read, for messages: the name of a file, for example."""
    timeout_s: float
    """The time limit for the next batch, in seconds."""

    def batches(self, start: Callable[[], Iterator[T]]) -> Generator[T, None, None]:
        """Yields the batches of the iterator of the DataLoader, which `start` creates.

        An exception that the Dataset raised in a worker is raised as torch raises it.

        Raises:
            DdpHpcError: a worker exited or could not be started, or a batch was not read within `timeout_s`.
        """
        batches = self._wait(lambda: _without_handler(start))
        try:
            while True:
                try:
                    batch = self._wait(lambda: next(batches))  # noqa: F821
                except StopIteration:
                    return
                except Exception as error:
                    # torch's frames in the traceback contain its iterator.
                    raise error.with_traceback(None) from error.__cause__
                yield batch
        finally:
            # The traceback of an error would keep the workers alive, and Python would wait for them at exit.
            del batches

    def _wait(self, call: Callable[[], T]) -> T:
        """Returns the result of a call that needs the workers; repeats it until `timeout_s` has passed."""
        end_s = time.monotonic() + self.timeout_s
        while True:
            try:
                return call()
            except (RuntimeError, OSError, EOFError) as error:
                text = str(error)
                if text.startswith("Caught "):  # torch's text for an exception of the Dataset in a worker
                    raise
                is_late = text.startswith("DataLoader timed out")
                if is_late and time.monotonic() < end_s:
                    continue
                # A worker that exits during a batch appears as a closed socket. Workers also fail to start if
                # there are too many open files.
                lost = explain_lost_worker(error)
                if not (is_late or lost) and isinstance(error, RuntimeError):
                    raise
                reason = lost or first_line(error)
            break
        if is_late:
            raise timed_out(self.timeout_s, self.source, f"{self.num} workers did not answer")
        raise DdpHpcError(f"reading {self.source} with {named('workers')} {self.num} failed: {reason}")


def timed_out(timeout_s: float, source: str, reason: str) -> DdpHpcError:
    """Returns the error for a batch that was not read in time."""
    return DdpHpcError(
        f"waited {timeout_s:g} s for samples of {source}: {reason}. "
        f"Check the file system, or raise {named('timeout')}"
    )


def prepare_worker(_: int) -> None:
    """Makes a worker ignore signals: the rank handles them, and still needs its workers in order to save.

    The kernel kills the worker when the rank exits (prctl(2)).
    """
    for sig in STOP_SIGNALS:
        signal.signal(sig, signal.SIG_IGN)
    die_with_parent()
    # After a sudden exit of the rank, multiprocessing would print a traceback of a lost connection.
    report = sys.excepthook
    sys.excepthook = lambda kind, *rest: None if issubclass(kind, OSError | EOFError) else report(kind, *rest)


def _without_handler(start: Callable[[], T]) -> T:
    """Starts workers, and removes torch's handler of SIGCHLD again.

    The handler would raise an error at any place of this program when a worker exits, but would miss a worker
    that exits before torch has registered its process ID. torch also looks for workers that have exited when
    the wait for a batch exceeds the `timeout` of the DataLoader.
    """
    handler = signal.getsignal(signal.SIGCHLD)
    started = start()
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, handler or signal.SIG_DFL)  # None: a handler that is written in C
    return started
