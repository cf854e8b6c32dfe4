"""When this job ends, and why the scheduler ends it."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping

from ddp_hpc.schedulers.deadline import current_end_s, find_deadline, kill_delay_s
from ddp_hpc.schedulers.running_job import RunningJob, StopCause, started_s
from ddp_hpc.schedulers.scheduler import Scheduler

# PBS sends SIGKILL as early as 10 s after SIGTERM, so an answer of its server must come before.
_ASK_LIMIT_S = 3.0
# The scheduler is asked again, for example before the signal of --requeue on-signal.
_ASK_AGAIN_LIMIT_S = 5.0
_RESERVE_S, _RESERVED_SHARE = 3.0, 0.4


class JobClock:
    """The end of this job, in seconds since the Unix epoch.

    `walltime_s` is the walltime of the directives, which counts if the scheduler does not report the end.
    `is_reported` is whether it does, or the user has set `DDP_HPC_DEADLINE`.

    Raises:
        RequestError: a variable for the end of the job does not contain a time.
    """

    def __init__(
        self, job: RunningJob, scheduler: Scheduler, walltime_s: float | None, environ: Mapping[str, str]
    ) -> None:
        self._job, self._environ = job, environ
        deadline = find_deadline(environ) if job.is_job else None
        self.is_reported = deadline is not None
        by_directive_s = None if walltime_s is None else started_s() + walltime_s
        self.end_s = deadline.at_s if deadline is not None else by_directive_s
        self._kill_delay_s = kill_delay_s(environ) if scheduler.has_queue else None
        self.stopped_s: float | None = None
        """The time of the last SIGTERM of the scheduler or of a user; None if there was none."""
        self._cause: StopCause = "unknown"
        self._asking: threading.Thread | None = None

    @property
    def reserve_s(self) -> float:
        """How long before SIGKILL the supervisor ends the launcher, in order to request another job."""
        return min(_RESERVE_S, _RESERVED_SHARE * (self._kill_delay_s or 0.0))

    @property
    def kill_delay_of_ranks_s(self) -> float | None:
        """The time between SIGTERM and the end of the ranks; None if the scheduler's delay is unknown."""
        return None if self._kill_delay_s is None else self._kill_delay_s - self.reserve_s

    @property
    def kill_s(self) -> float | None:
        """When the scheduler sends SIGKILL to this job; None if this is unknown."""
        if self._kill_delay_s is None:
            return None
        reported_s = self.end_s if self.is_reported else None
        ends_s = [end_s for end_s in (reported_s, self.stopped_s) if end_s is not None]
        return min(ends_s) + self._kill_delay_s if ends_s else None

    @property
    def ranks_left_s(self) -> float:
        """The time until the end of the walltime; infinity if this is unknown."""
        return math.inf if self.end_s is None else self.end_s - time.time()

    def left_s(self, limit_s: float) -> float:
        """Returns the time until SIGKILL, at most `limit_s`, and at least 0."""
        return limit_s if self.kill_s is None else min(limit_s, max(0.0, self.kill_s - time.time()))

    def ask_again(self) -> None:
        """Asks the scheduler for the end of the job, which a user or an administrator may have changed."""
        if self.is_reported:
            end_s = current_end_s(self._environ, limit_s=_ASK_AGAIN_LIMIT_S)
            if end_s is not None:
                self.end_s = end_s

    def stop(self) -> None:
        """Records that SIGTERM has arrived, and asks the scheduler for the cause in the background."""
        self.stopped_s = time.time()
        if self._asking is None:
            self._asking = threading.Thread(target=self._ask_for_cause, daemon=True)
            self._asking.start()

    def is_ending(self) -> bool:
        """Asks the scheduler whether it ends this job, of which SIGTERM may not have arrived yet."""
        return self._job.is_job and self._job.stop_cause(_ASK_LIMIT_S) != "unknown"

    def stop_cause(self) -> StopCause:
        """Returns why SIGTERM was sent, once the scheduler has answered; `unknown` without an answer."""
        if self._asking is not None:
            self._asking.join(_ASK_LIMIT_S)
        return self._cause

    def may_resume(self) -> bool:
        """Returns whether this job may have to request another one, as far as is known now."""
        return self._cause not in ("cancelled", "requeued")

    def _ask_for_cause(self) -> None:
        self._cause = self._job.stop_cause(_ASK_LIMIT_S)
