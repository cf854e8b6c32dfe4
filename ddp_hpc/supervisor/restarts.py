"""Whether a job starts its ranks again after a failure, from the newest snapshot."""

from __future__ import annotations

from ddp_hpc.base.run_outcomes import Cause
from ddp_hpc.supervisor.ended_attempt import EndedAttempt
from ddp_hpc.supervisor.job_clock import JobClock
from ddp_hpc.supervisor.settings import Settings

# A restart imports torch from a busy file system, reads the snapshot, and must save another one.
LEAST_S = 120.0


def why_no_restart(
    ended: EndedAttempt,
    earlier: EndedAttempt | None,
    last_saved: EndedAttempt | None,
    settings: Settings,
    *,
    num_restarts: int,
    may_begin_again: bool = False,
) -> str:
    """Returns why the ranks are not started again after a failure; empty if they are.

    `earlier` is the attempt before this one in the same job, and `last_saved` the last one that has saved a
    snapshot. `may_begin_again` is whether a run without a snapshot overwrites nothing when it starts from its
    beginning: it does so after the loss of a rank, which is not an error of the program.
    """
    is_lost = may_begin_again and ended.end is not None and ended.end.cause is Cause.LOST_RANK
    if ended.why_final:
        return ended.why_final
    if not settings.restarts:
        return "--restarts is 0"
    if not ended.has_begun_like(earlier):
        return "no rank started successfully after the last restart"
    if last_saved is None and not ended.after.step and not is_lost:
        return "the run has no snapshot and no recorded checkpoint"
    # A lost node is not the program's fault, and uses up a spare node.
    has_lost_node = bool(ended.launcher.lost_nodes)
    if earlier is not None and not (has_lost_node or ended.has_progressed or earlier.has_progressed):
        return "two attempts in a row have saved no snapshot"
    if num_restarts >= settings.restarts:
        return f"this job has used all its restarts (--restarts {settings.restarts})"
    if ended.attempt.number >= settings.max_attempts:
        return f"attempt {ended.attempt.number} was the last that --max-attempts allows"
    return ""


def why_no_time(clock: JobClock, settings: Settings) -> str:
    """Returns why too little time is left for a restart before the ranks must stop; empty if it is enough."""
    left_s = clock.ranks_left_s - (settings.signal_lead_s or 0.0)
    if left_s < LEAST_S:
        return f"only {max(0.0, left_s):.0f} s of the walltime are left, and a restart needs {LEAST_S:.0f} s"
    return ""
