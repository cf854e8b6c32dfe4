"""How all ranks stop together before the scheduler kills them. One protocol for `ddp_hpc.train`,
`ddp_hpc.snapshots` and `ddp_hpc.deadline`.

Each rank has a request of its own, after a signal, or on rank 0 near the end of the job. Ranks exchange their
requests as numbers in a `RankReport`, about once per second, and then all stop for the first request.

The *margin* is how long before the end of the job the run must stop. This module does not import torch.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable

from ddp_hpc.base.run_outcomes import Cause, Stop
from ddp_hpc.schedulers.deadline import Deadline, MovingDeadline

EXCHANGE_S = 1.0
"""The interval at which ranks exchange their requests, but at most once per step."""
# Requests: 0 means none, numbers below 1000 are those of signals, and greater ones are below.
TIME_LIMIT = 1000
"""The request of rank 0 if the end of the job is near."""
# Later steps of a script can be much slower than the first ones.
MOST_STEPS_OF_SCRIPT = 100


class ExchangeSchedule:
    """After which steps the ranks exchange their requests; the same on all ranks."""

    def __init__(self, step: int, *, most_steps: int = sys.maxsize) -> None:
        self._last_step, self._last_s = step, time.monotonic()
        self._next_step, self._most_steps = step, most_steps

    def is_due(self, step: int) -> bool:
        """Returns whether the ranks exchange their requests after this step."""
        return step >= self._next_step

    def mean_step_s(self, step: int) -> float:
        """Returns the mean time of the steps of this rank since the last exchange."""
        return (time.monotonic() - self._last_s) / max(1, step - self._last_step)

    def exchanged(self, step: int, slowest_s: float) -> None:
        """Sets the next exchange; `slowest_s` is the mean time of a step on the slowest rank."""
        num_steps = int(EXCHANGE_S / slowest_s) if slowest_s else 1
        self._last_step, self._last_s = step, time.monotonic()
        self._next_step = step + min(max(1, num_steps), self._most_steps)


class OwnRequest:
    """The request of this rank to stop.

    `ask` asks the scheduler for the end of the job, which can change; None on ranks that follow rank 0.
    """

    def __init__(self, deadline: Deadline | None, ask: Callable[[], float | None] | None) -> None:
        self.source = deadline.source if deadline is not None else "the clock"
        """Where the end of the job is known from."""
        self.signal = 0
        """The number of the signal that this rank has received; 0 if there was none."""
        self._is_asking = ask is not None
        self._deadline = MovingDeadline(deadline.at_s, ask or _nothing) if deadline is not None else None
        self._followed_s = self.deadline_s

    @property
    def deadline_s(self) -> float:
        """The end of the job in seconds since the Unix epoch, as far as this rank knows; 0 if unknown."""
        return self._deadline.at_s if self._deadline is not None else 0.0

    def number(self, margin_s: float) -> int:
        """Returns the request: 0 for none, a signal number, or `TIME_LIMIT`."""
        if self.signal:
            return self.signal
        is_near = self._is_asking and self._deadline is not None and self._deadline.is_within(margin_s)
        return TIME_LIMIT if is_near else 0

    def follow(self, deadline_s: float) -> bool:
        """Takes over the end of the job that rank 0 knows (0: unknown); returns whether it has changed."""
        if not deadline_s or deadline_s == self._followed_s:
            return False
        self._followed_s = deadline_s
        if self._deadline is None:
            self._deadline = MovingDeadline(deadline_s, _nothing)
        self._deadline.at_s = deadline_s
        return True

    def stop_for(self, request: int, rank: int, margin_s: float) -> Stop:
        """Returns why the run stops for this request of a rank."""
        if request == TIME_LIMIT:
            near = f"the job's time limit is near ({self.source}; stopping {margin_s:.0f} s early to save)"
            return Stop(Cause.STOPPED, near)
        return Stop(Cause.STOPPED, f"rank {rank} received {signal.Signals(request).name}")


def _nothing() -> None:
    return None
