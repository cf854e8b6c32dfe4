"""Ends a process that does not stop in time, shortly before the scheduler would kill it without a message."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from ddp_hpc.base.errors import EXIT_FAILED

ERROR_REPORT_S = 2.0
"""The time reserved before SIGKILL in order to report the error."""
_POLL_S = 0.25


class LastResort:
    """If the process still runs at a time set with `end_in`, `end_before_kill` is called in a thread, with
    one line, and ends the process. If Python is blocked in a C call, a timer outside of Python writes all
    stacks to `stacks` (None: stderr) and ends the process.
    """

    def __init__(self, stacks: Path | None, end_before_kill: Callable[[str], None]) -> None:
        self._stacks, self._end_before_kill = stacks, end_before_kill
        self._file: TextIO | None = None
        self._over = threading.Event()
        self._ends: dict[str, float] = {}  # the times by their reasons

    def start(self) -> None:
        """Starts the thread: a signal handler, which calls `end_in`, must not start threads."""
        threading.Thread(target=self._watch, name="last resort", daemon=True).start()

    def cancel(self) -> None:
        """Cancels all times, because the process ends by itself."""
        self._over.set()
        faulthandler.cancel_dump_traceback_later()
        if self._file is not None:
            self._file.close()
            with suppress(OSError):  # remove the file if it is empty
                if self._stacks is not None and not self._stacks.stat().st_size:
                    self._stacks.unlink()
                    self._stacks.parent.rmdir()

    def end_in(self, seconds: float, when: str, *, once: bool = False) -> None:
        """Sets a time by which the process must have ended; `when` describes it. The earliest time counts.

        With `once`, a time that was set with the same description does not change.
        """
        if once and when in self._ends:
            return
        self._ends[when] = time.monotonic() + max(seconds - ERROR_REPORT_S, 0.5)
        seconds = min(self._ends.values()) - time.monotonic()
        if self._file is None and self._stacks is not None:
            with suppress(OSError):
                self._stacks.parent.mkdir(parents=True, exist_ok=True)
                # Append, to keep the stacks of earlier attempts.
                self._file = self._stacks.open("a", encoding="utf-8")
        self._end_below_python(seconds + ERROR_REPORT_S / 2)

    def _end_below_python(self, seconds: float) -> None:
        if (file := self._file or sys.stderr) is not None:
            faulthandler.dump_traceback_later(seconds, exit=True, file=file)

    def _watch(self) -> None:
        while not self._over.wait(_POLL_S):
            if self._ends and time.monotonic() > min(self._ends.values()):
                break
        else:
            return
        # Python still runs and can report a better error. Rank 0 waits one second, so that the other ranks
        # receive the error.
        self._end_below_python(ERROR_REPORT_S - 2 * _POLL_S)
        if self._file is not None:
            faulthandler.dump_traceback(self._file)
        where = f"; its stacks: {self._stacks}" if self._file is not None else ""
        when = min(self._ends, key=lambda name: self._ends[name])
        self._end_before_kill(
            f"this rank did not stop in time: {when}, shortly before SIGKILL, it was still starting, "
            f"running a step, or saving{where}"
        )
        os._exit(EXIT_FAILED)
