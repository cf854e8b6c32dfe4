"""Whether a job starts its ranks again after a failure, from the newest snapshot."""

from __future__ import annotations

from dataclasses import dataclass

from ddp_hpc.base.run_outcomes import Cause
from ddp_hpc.queue.submission_ledger import Attempt
from ddp_hpc.supervisor.settings import Settings
from ddp_hpc.supervisor.settle import Settled

# A restart imports torch from a busy file system, reads the snapshot, and must save another one.
LEAST_S = 120.0


@dataclass(frozen=True)
class Ended:
    """An attempt that has ended, and what it has recorded."""

    attempt: Attempt
    settled: Settled

    @property
    def may_restart(self) -> bool:
        """Whether another start can help."""
        after, end = self.settled.after, self.settled.end
        if end is None:
            is_restartable = after.state is not None and after.state.is_failure
        else:
            is_victim = end.cause is Cause.STOPPED and self.settled.was_launcher_killed
            is_restartable = end.cause.may_restart or is_victim
        is_complete = after.state is not None and after.state.is_complete
        return self.settled.may_restart and is_restartable and not is_complete

    @property
    def has_progressed(self) -> bool:
        """Whether the attempt has saved a snapshot."""
        after = self.settled.after
        return after.step > self.attempt.first_step or not after.is_step_known

    def repeats(self, earlier: Ended | None) -> bool:
        """Returns whether the program itself has ended both attempts at the same place: the same exception in
        the same step, or the same exit code after the same checkpoint.
        """
        if earlier is None or earlier.settled.end is None or self.settled.end is None:
            return False
        if not self.has_begun_like(earlier):
            return False
        end, before = self.settled.end, earlier.settled.end
        if self.settled.was_launcher_killed:  # SIGKILL comes from outside, such as from a node that fails
            return False
        if end.cause not in (Cause.FAILED, Cause.EXITED) or (end.step is None and self.has_progressed):
            return False
        return (end.exception, end.step, end.exit_code) == (before.exception, before.step, before.exit_code)

    def suspected_node(self, earlier: Ended | None) -> str:
        """Returns the host on which two attempts in a row have failed, the second one without progress; empty
        if there is none, or if the same exception in the same step shows that the program is the cause.
        """
        if earlier is None or earlier.settled.end is None or self.settled.end is None or self.has_progressed:
            return ""
        end, before = self.settled.end, earlier.settled.end
        is_exact = bool(end.exception) and end.step is not None and self.repeats(earlier)
        if is_exact or end.host != before.host or not (self.settled.may_restart and end.cause.may_restart):
            return ""
        return end.host

    @property
    def was_lost(self) -> bool:
        """Whether ranks were lost before they saved a snapshot."""
        end = self.settled.end
        return end is not None and end.cause.may_resume and not self.has_progressed

    def has_begun_like(self, earlier: Ended | None) -> bool:
        """Returns whether the ranks have begun, as far as this is known of the earlier attempt."""
        return earlier is None or self.settled.has_begun or not earlier.settled.has_begun


def why_no_restart(
    ended: Ended,
    earlier: Ended | None,
    last_saved: Ended | None,
    settings: Settings,
    *,
    num_restarts: int,
    left_s: float,
) -> str:
    """Returns why the ranks are not started again after a failure; empty if they are.

    `earlier` is the attempt before this one in the same job, and `last_saved` the last one that has saved a
    snapshot. `left_s` is the time until the ranks must stop.
    """
    if last_saved is None and not ended.settled.after.step:
        return "the run has no snapshot and no recorded checkpoint"
    if earlier is not None and not (ended.has_progressed or earlier.has_progressed):
        return "two attempts in a row have saved no snapshot"
    if num_restarts >= settings.restarts:
        return f"--restarts {settings.restarts} of this job are used up"
    if ended.attempt.number >= settings.max_attempts:
        return f"attempt {ended.attempt.number} was the last (--max-attempts)"
    if left_s < LEAST_S:
        return f"only {max(0.0, left_s):.0f} s are left, and a restart needs {LEAST_S:.0f} s"
    return ""
