"""The end time of the allocation, from the job script or from the scheduler."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from ddp_hpc.base.errors import RequestError
from ddp_hpc.base.job_variables import JOB_VARIABLES
from ddp_hpc.schedulers.registry import scheduler_of_job
from ddp_hpc.schedulers.run_command import NoAnswerError, run
from ddp_hpc.schedulers.scheduler import Scheduler

# A busy server must not delay the start of the training, so the query has a short time limit.
_ASK_LIMIT_S = 15.0
_LEAD_S = 20.0
# Schedulers report the remaining time in whole seconds.
_SAME_S = 3.0
REPORTED_BY = "DDP_HPC_DEADLINE_SOURCE"
"""The scheduler that has reported DDP_HPC_DEADLINE. The supervisor sets this variable."""


@dataclass(frozen=True)
class Deadline:
    """The end of the allocation in seconds since the Unix epoch, and the source of this time for messages."""

    at_s: float
    source: str


def job_and_start(environ: Mapping[str, str]) -> tuple[str, str]:
    """Returns the ID of this job, and a text that is different for each start of it; empty outside a job."""
    if not (scheduler := scheduler_of_job(environ)):
        return "", ""
    own = scheduler.inside_job
    return own.job_id(environ), environ.get(own.variables.start, "")


def find_deadline(environ: Mapping[str, str], *, may_ask: bool = True) -> Deadline | None:
    """Returns the end of this job's allocation, or None if it is unknown.

    The sources are `DDP_HPC_DEADLINE`, then the scheduler's own variable, such as `SLURM_JOB_END_TIME`
    (Slurm 23 and later), then, with `may_ask`, one query to the scheduler, which only one rank should send.

    Raises:
        RequestError: one of the variables is not a time.
    """
    for name in ("DDP_HPC_DEADLINE", *(variables.end_s for variables in JOB_VARIABLES.values())):
        if text := environ.get(name, ""):
            if not re.fullmatch(r"\d{1,10}(\.\d*)?", text):
                raise RequestError(
                    f"{name} must be a time in seconds since the Unix epoch, such as the output of date +%s "
                    f"(got {text!r})"
                )
            return Deadline(float(text), name)
    end = _ask_end_s(environ) if may_ask else None
    return Deadline(*end) if end else None


def current_end_s(environ: Mapping[str, str], *, limit_s: float | None = None) -> float | None:
    """Asks the scheduler for the end of this job, which can have been changed since its start.

    None if the deadline was set by the user, or if the scheduler does not answer within `limit_s`.
    """
    if environ.get("DDP_HPC_DEADLINE") and not environ.get(REPORTED_BY):
        return None
    end = _ask_end_s(environ, limit_s)
    return end[0] if end else None


def _ask_end_s(environ: Mapping[str, str], limit_s: float | None = None) -> tuple[float, str] | None:
    scheduler = scheduler_of_job(environ)
    ask = partial(ask_once, limit_s=limit_s)
    return scheduler.inside_job.read_end_s(environ, ask) if scheduler else None


class MovingDeadline:
    """The end of this job, for which the scheduler is asked again shortly before.

    An administrator can extend the walltime of a running job with qalter or `scontrol update`. The scheduler
    is asked in a thread, `_LEAD_S` before the answer is needed.
    """

    def __init__(self, at_s: float, ask: Callable[[], float | None]) -> None:
        self.at_s = at_s
        self._ask = ask
        self._asked_for_s = 0.0

    def is_within(self, margin_s: float) -> bool:
        """Returns whether the job ends within this time. Does not wait for the scheduler."""
        left_s = self.at_s - time.time()
        if left_s < margin_s + _LEAD_S and self._asked_for_s != self.at_s:
            self._asked_for_s = self.at_s
            threading.Thread(target=self._ask_again, daemon=True).start()
        return left_s < margin_s

    def _ask_again(self) -> None:
        found_s = self._ask()
        if found_s is not None and abs(found_s - self.at_s) > _SAME_S:
            self.at_s = found_s


def kill_delay_s(environ: Mapping[str, str]) -> float | None:
    """Returns the seconds from SIGTERM to SIGKILL at the end of the job; None if they are unknown.

    Raises:
        RequestError: `DDP_HPC_KILL_DELAY_S` is not a number of seconds.
    """
    text = environ.get("DDP_HPC_KILL_DELAY_S", "")
    if text:
        if not re.fullmatch(r"\d{1,6}(\.\d*)?", text):
            raise RequestError(f"DDP_HPC_KILL_DELAY_S must be a number of seconds (got {text!r})")
        return float(text)
    # Not 0 if the delay is unknown: ranks would end themselves at once after SIGTERM.
    own = scheduler_of_job(environ)
    delay = kill_delay_variable(own).get("DDP_HPC_KILL_DELAY_S") if own else None
    return None if delay is None else float(delay)


def kill_delay_variable(scheduler: Scheduler) -> dict[str, str]:
    """Returns DDP_HPC_KILL_DELAY_S with the scheduler's configured or usual delay; empty if it is unknown."""
    delay_s = scheduler.inside_job.read_kill_delay_s(ask_once)
    if delay_s is None:
        delay_s = scheduler.inside_job.kill_delay_s or None
    return {} if delay_s is None else {"DDP_HPC_KILL_DELAY_S": str(delay_s)}


def ask_once(*argv: str, limit_s: float | None = None) -> str:
    """Runs a query once, without retries, and returns its output; empty if the query failed."""
    try:
        answer = run(argv, limit_s or _ASK_LIMIT_S)
    except NoAnswerError:
        return ""
    return answer.out if answer.code == 0 else ""
