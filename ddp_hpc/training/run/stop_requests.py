"""Stops a run on this rank after a signal, or near the end of the job; see `stop_protocol`.

No extra messages are sent: each rank's request is sent with the losses that ranks exchange anyway.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from ddp_hpc.base.process_control import STOP_SIGNALS
from ddp_hpc.base.run_outcomes import Stop
from ddp_hpc.training.run.last_resort import ERROR_REPORT_S, LastResort
from ddp_hpc.training.run.stop_protocol import EXCHANGE_S, OwnRequest

# A scheduler sends SIGKILL soon after these signals. SIGUSR1 and SIGUSR2 are sent earlier, at a time before
# the time limit that the job script requests.
_LAST_WARNINGS = (signal.SIGTERM, signal.SIGINT)
_SAME_SIGNAL_S = 1.0
_SAVE_RESERVE, _STEP_RESERVE = 1.5, 2.0


class StopRequests:
    """The stop requests of a run with snapshots. A context manager, which restores the old signal handlers.

    `own` is the request of this rank. `stacks` and `end_before_kill` are those of `LastResort`: the process
    ends itself if it still runs shortly before the scheduler's SIGKILL. `is_lost` is whether another rank has
    failed.
    """

    def __init__(
        self,
        own: OwnRequest,
        kill_delay_s: float | None,
        *,
        stacks: Path | None,
        end_before_kill: Callable[[str], None],
        is_lost: Callable[[], bool],
    ) -> None:
        self.own = own
        self._kill_delay_s = kill_delay_s
        self._last_resort = LastResort(stacks, end_before_kill)
        self.is_lost = is_lost
        self._signalled_s = 0.0
        self._longest_step_s = self._longest_save_s = self._expected_save_s = 0.0

    def __enter__(self) -> StopRequests:
        self._last_resort.start()
        self._old = {sig: signal.signal(sig, self._on_signal) for sig in STOP_SIGNALS}
        self._end_at_deadline()
        return self

    def __exit__(self, *_: object) -> None:
        self._last_resort.cancel()
        for sig, handler in self._old.items():
            signal.signal(sig, handler)

    def stop_request(self) -> int:
        """Returns this rank's request, see `OwnRequest.number`."""
        return self.own.number(self.margin_s())

    def stop_for(self, request: int, rank: int) -> Stop:
        """Returns why the run stops for this request of a rank."""
        return self.own.stop_for(request, rank, self.margin_s())

    def move_deadline(self, deadline_s: float) -> bool:
        """Takes over the end of the job that rank 0 has learned; returns whether it has changed."""
        if not self.own.follow(deadline_s):
            return False
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
        """Returns how long before the end of the job the run must stop.

        The margin covers a save, the exchange of requests and the kill delay. It is always longer than the
        time that the last resort reserves, even without a kill delay.
        """
        return (
            _SAVE_RESERVE * (self._longest_save_s or self._expected_save_s)
            + _STEP_RESERVE * self._longest_step_s
            + (self._kill_delay_s or 0.0)
            + EXCHANGE_S
            + ERROR_REPORT_S
        )

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        del frame
        if self.is_lost():  # another rank failed, and the failure watch ends this one
            raise SystemExit(128 + signum)
        now_s = time.monotonic()
        # A terminal sends Ctrl-C to the ranks and to the launcher, which forwards it to them again.
        is_second = self.own.signal and now_s - self._signalled_s > _SAME_SIGNAL_S
        if signum == signal.SIGINT and is_second:
            raise KeyboardInterrupt
        self.own.signal, self._signalled_s = signum, now_s
        if signum in _LAST_WARNINGS and self._kill_delay_s is not None:
            when = f"{self._kill_delay_s:g} s after {signal.Signals(signum).name}"
            self._last_resort.end_in(self._kill_delay_s, when, once=True)

    def _end_at_deadline(self) -> None:
        if deadline_s := self.own.deadline_s:
            left_s = deadline_s - time.time() + (self._kill_delay_s or 0.0)
            self._last_resort.end_in(left_s, f"at the job's time limit ({self.own.source})")
