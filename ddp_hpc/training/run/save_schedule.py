"""When a snapshot is due, and what all ranks decide after a step. Needs neither a process group nor files."""

from __future__ import annotations

import time
from dataclasses import dataclass

from ddp_hpc.base.run_outcomes import Stop
from ddp_hpc.training.health.rank_report import RankReports
from ddp_hpc.training.run.stop_requests import StopRequests


@dataclass(frozen=True)
class Decision:
    """The decision that all ranks make after a step."""

    save: bool
    stop: Stop | None
    """Why the run stops after this step; None if it continues."""

    def combined_with(self, later: Decision) -> Decision:
        """Returns what both decisions request."""
        return Decision(save=self.save or later.save, stop=self.stop or later.stop)


CONTINUE = Decision(save=False, stop=None)


@dataclass
class SaveSchedule:
    """Saves every `every_steps` steps (None: not by steps), and if the last save is older than `every_s`."""

    every_steps: int | None
    every_s: float
    last_save_s: float

    def is_due_at(self, step: int) -> bool:
        """Returns whether a snapshot is due after this step, on every rank alike."""
        return self.every_steps is not None and step % self.every_steps == 0

    def is_overdue(self) -> bool:
        """Returns whether the last snapshot is too old by the clock of this rank."""
        return time.monotonic() - self.last_save_s > self.every_s

    def saved(self) -> None:
        """Starts the time to the next save."""
        self.last_save_s = time.monotonic()


def decide(
    reports: RankReports, schedule: SaveSchedule, requests: StopRequests, step: int, *, is_last: bool
) -> Decision:
    """Returns the decision of all ranks after this step.

    It depends only on the reports of all ranks and on the step, so it is the same on every rank.
    """
    stop_request, rank = reports.first_stop_request()
    is_due = reports.save_due() or schedule.is_due_at(step)
    stop = requests.stop_for(stop_request, rank) if stop_request and not is_last else None
    return Decision(save=is_due or is_last or stop is not None, stop=stop)
