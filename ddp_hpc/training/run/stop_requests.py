"""Stops a run before the scheduler kills it: all ranks decide together, after a signal or near the walltime
limit.

No extra messages are sent: each rank's stop request is sent with the losses that ranks exchange anyway.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import TextIO

from ddp_hpc.base.errors import EXIT_FAILED
from ddp_hpc.base.process_control import STOP_SIGNALS
from ddp_hpc.schedulers.deadline import Deadline, MovingDeadline

# A scheduler sends SIGKILL soon after these signals. SIGUSR1 and SIGUSR2 are sent earlier, at a time before
# the time limit that the job script requests.
_LAST_WARNINGS = (signal.SIGTERM, signal.SIGINT)
DEADLINE = 1000
"""The stop request of rank 0 if the time limit is near. All other stop requests are signal numbers; 0 means
no request."""

# Time reserved before SIGKILL in order to report the error.
_ERROR_REPORT_S = 2.0
_SAME_SIGNAL_S = 1.0
_POLL_S = 0.25
_SAVE_RESERVE, _STEP_RESERVE = 1.5, 2.0
EXCHANGE_S = 1.0
"""Interval at which ranks exchange their stop requests, but at most once per step."""


def next_exchange(step: int, slowest_s: float) -> int:
    """Returns the step after which ranks next exchange stop requests: in about a second, or the next step."""
    return step + (max(1, int(EXCHANGE_S / slowest_s)) if slowest_s else 1)


def _nothing() -> None:
    return None


class StopRequests:
    """Collects this rank's stop requests. A context manager, which restores the old signal handlers.

    The last resort: if the process still runs shortly before the scheduler's SIGKILL, `end_before_kill` is
    called with one line and ends the process. If Python is blocked in a C call, a timer outside of Python
    writes all stacks to `stacks` (None: stderr) and ends the process.
    """

    def __init__(
        self,
        deadline: Deadline | None,
        kill_delay_s: float | None,
        *,
        ask: Callable[[], float | None] | None,
        stacks: Path | None,
        end_before_kill: Callable[[str], None],
        is_lost: Callable[[], bool],
    ) -> None:
        self._source = deadline.source if deadline is not None else "the clock"
        self._deadline = MovingDeadline(deadline.at_s, ask or _nothing) if deadline is not None else None
        self._kill_delay_s = kill_delay_s
        self._checks_deadline = ask is not None
        self._stacks = stacks
        self._end_before_kill = end_before_kill
        self.is_lost = is_lost
        self._signal, self._signalled_s = 0, 0.0
        self._moved_to_s = deadline.at_s if deadline is not None else 0.0
        self._longest_step_s = self._longest_save_s = self._expected_save_s = 0.0
        self._file: TextIO | None = None
        # A signal handler must not start threads, so the thread of the last resort is started in advance.
        self._over = threading.Event()
        # When the process must end: at the end of the job, and some time after a signal.
        self._ends: dict[str, float] = {}

    def __enter__(self) -> StopRequests:
        threading.Thread(target=self._watch, name="last resort", daemon=True).start()
        self._old = {sig: signal.signal(sig, self._on_signal) for sig in STOP_SIGNALS}
        self._end_at_deadline()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        faulthandler.cancel_dump_traceback_later()
        if self._file is not None:
            self._file.close()
            with suppress(OSError):  # remove the file if it is empty
                if self._stacks is not None and not self._stacks.stat().st_size:
                    self._stacks.unlink()
                    self._stacks.parent.rmdir()
        for sig, handler in self._old.items():
            signal.signal(sig, handler)

    def stop_request(self) -> int:
        """Returns this rank's stop request: 0 for no request, a signal number, or `DEADLINE`."""
        if self._signal:
            return self._signal
        if self._checks_deadline and self._deadline is not None:
            return DEADLINE if self._deadline.is_within(self.margin_s()) else 0
        return 0

    @property
    def deadline_s(self) -> float:
        """The end of the job in seconds since the Unix epoch, as far as this rank knows; 0 if unknown."""
        return self._deadline.at_s if self._deadline is not None else 0.0

    def move_deadline(self, deadline_s: float) -> bool:
        """Takes over the end of the job that rank 0 has learned; returns whether it has changed."""
        if self._deadline is None or not deadline_s or deadline_s == self._moved_to_s:
            return False
        self._moved_to_s = self._deadline.at_s = deadline_s
        self._end_at_deadline()
        return True

    def measured(self, *, step_s: float = 0.0, save_s: float = 0.0) -> None:
        """Records the measured duration of a step or of a whole save, if it is the longest one so far."""
        self._longest_step_s = max(self._longest_step_s, step_s)
        self._longest_save_s = max(self._longest_save_s, save_s)

    def expect_save(self, save_s: float) -> None:
        """Sets the estimated duration of a save, which is used until a save has been measured."""
        self._expected_save_s = save_s

    def margin_s(self) -> float:
        """Returns how long before the job's time limit the run must stop.

        The margin covers a save, the exchange of requests and the kill delay. It is always longer than the
        time that the last resort reserves, even without a kill delay.
        """
        return (
            _SAVE_RESERVE * (self._longest_save_s or self._expected_save_s)
            + _STEP_RESERVE * self._longest_step_s
            + (self._kill_delay_s or 0.0)
            + EXCHANGE_S
            + _ERROR_REPORT_S
        )

    def explain(self, stop_request: int, rank: int) -> str:
        """Describes the stop request for a message."""
        if stop_request != DEADLINE:
            return f"rank {rank} received {signal.Signals(stop_request).name}"
        return (
            f"the job's time limit is near ({self._source}; stopping {self.margin_s():.0f} s early to save)"
        )

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        del frame
        if self.is_lost():  # another rank failed, and the failure watch ends this one
            raise SystemExit(128 + signum)
        now_s = time.monotonic()
        # A terminal sends Ctrl-C to the ranks and to the launcher, which forwards it to them again.
        if self._signal and signum == signal.SIGINT and now_s - self._signalled_s > _SAME_SIGNAL_S:
            raise KeyboardInterrupt
        self._signal, self._signalled_s = signum, now_s
        if signum in _LAST_WARNINGS and self._kill_delay_s is not None:
            when = f"{self._kill_delay_s:g} s after {signal.Signals(signum).name}"
            if when not in self._ends:
                self._end_in(self._kill_delay_s, when)

    def _end_at_deadline(self) -> None:
        if self._deadline is not None:
            left_s = self._deadline.at_s - time.time() + (self._kill_delay_s or 0.0)
            self._end_in(left_s, f"at the job's time limit ({self._source})")

    def _end_in(self, seconds: float, when: str) -> None:
        """Sets the timer of the last resort so that the process ends within `seconds`, for the reason `when`.

        The earliest of all times counts.
        """
        self._ends[when] = time.monotonic() + max(seconds - _ERROR_REPORT_S, 0.5)
        seconds = min(self._ends.values()) - time.monotonic()
        if self._file is None and self._stacks is not None:
            with suppress(OSError):
                self._stacks.parent.mkdir(parents=True, exist_ok=True)
                # Append, to keep the stacks of earlier attempts.
                self._file = self._stacks.open("a", encoding="utf-8")
        self._end_below_python(seconds + _ERROR_REPORT_S / 2)

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
        self._end_below_python(_ERROR_REPORT_S - 2 * _POLL_S)
        if self._file is not None:
            faulthandler.dump_traceback(self._file)
        where = f"; its stacks: {self._stacks}" if self._file is not None else ""
        what = "this rank was still starting, in a step or saving"
        when = min(self._ends, key=lambda one: self._ends[one])
        self._end_before_kill(f"{what} {when}, shortly before SIGKILL{where}")
        os._exit(EXIT_FAILED)
