"""The attempts of one job: starts the ranks, and again after failures that a restart can repair."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

from ddp_hpc.base.errors import DdpHpcError
from ddp_hpc.base.run_outcomes import State
from ddp_hpc.base.text_table import cut
from ddp_hpc.base.timeline import Moment, note
from ddp_hpc.discovery.silence import IDLE_TIMEOUT
from ddp_hpc.queue.submission_ledger import Attempt
from ddp_hpc.supervisor import decisions
from ddp_hpc.supervisor.check_nodes import check_nodes
from ddp_hpc.supervisor.ended_attempt import EndedAttempt
from ddp_hpc.supervisor.external_program_state import Progress
from ddp_hpc.supervisor.idle_watch import IdleWatch
from ddp_hpc.supervisor.job_clock import JobClock
from ddp_hpc.supervisor.job_log import complain, say
from ddp_hpc.supervisor.launch import Launch
from ddp_hpc.supervisor.launcher_process import LauncherEnd
from ddp_hpc.supervisor.restarts import why_no_restart, why_no_time
from ddp_hpc.supervisor.run_files import RunFiles, SeenState
from ddp_hpc.supervisor.settings import Settings
from ddp_hpc.supervisor.settle import (
    StartedAttempt,
    settle,
    settle_as_before,
    settle_repeated,
    store,
    why_stopped,
)

# The log already contains the whole reason.
_REASON_CHARS = 120
# The exit code of a shell for a program that it cannot start.
_NOT_STARTED = 127


def run_attempts(
    attempt: Attempt, launch: Launch, clock: JobClock, files: RunFiles, settings: Settings
) -> EndedAttempt:
    """Runs the first attempt of this job, and others after failures that a restart can repair."""
    earlier: EndedAttempt | None = None
    last_saved: EndedAttempt | None = None
    pool = launch.pool
    for num_restarts in count():
        ended = _run_attempt(attempt, launch, clock, files, settings, is_restart=earlier is not None)
        if ended.has_progressed:
            last_saved = ended
        suspect = pool.replaceable(ended.suspected_node(earlier)) if pool is not None else ""
        if ended.repeats(earlier) and not suspect:
            repeated = settle_repeated(ended, files)
            _say_why_not(attempt, repeated.after.reason, files)
            return repeated
        if not ended.has_failed:
            break
        why = why_no_restart(
            ended,
            earlier,
            last_saved,
            settings,
            num_restarts=num_restarts,
            may_begin_again=launch.writes_state,
        )
        why = why or why_no_time(clock, settings)
        if pool is not None:
            why = why or pool.replace_bad(suspect)
        must_end_ranks = ended.launcher.may_have_left_ranks
        why = why or check_nodes(launch, clock, files, settings, must_end_ranks=must_end_ranks)
        why = why or why_no_time(clock, settings)
        # The nodes were asked for some seconds.
        if ended.may_restart and (stop := why_stopped(attempt, clock, files)):
            ended = replace(ended, stop=stop)
            why = ended.why_final
        following = decisions.next_attempt(attempt, ended.after)
        if why := why or _why_not_recorded(following, files):
            _say_why_not(attempt, why, files)
            break
        earlier, attempt = ended, following
        _announce(ended, following, files, f"restart {num_restarts + 1} of {settings.restarts} in this job")
    before = last_saved or earlier
    if before is None or not (ended.was_lost or not ended.has_begun_like(before)):
        return ended
    # A start that was refused is not in the list of attempts. In that of another job, nothing is changed.
    if not any(files.is_last(known.attempt) for known in (ended, earlier) if known is not None):
        return ended
    return settle_as_before(before, ended, files)


def _say_why_not(attempt: Attempt, why: str, files: RunFiles) -> None:
    say(f"ddp-hpc: the ranks are not started again in this job: {why}")
    note(files.path, attempt.key, Moment.NOT_RESTARTED, reason=why)


def _announce(ended: EndedAttempt, following: Attempt, files: RunFiles, what: str) -> None:
    """Writes the state of a run whose next attempt begins, and why it does to the log of the job."""
    begin = SeenState(State.RUNNING, following.first_step, f"attempt {following.number} begins")
    store(replace(begin, is_step_known=ended.after.is_step_known), files)
    reason = cut(ended.end.reason if ended.end is not None else ended.after.reason, _REASON_CHARS)
    say(
        f"ddp-hpc: {what}{decisions.at_step(following.first_step, ', from step ')}, because attempt "
        f"{ended.attempt.number} failed{f': {reason}' if reason else ''}"
    )


def _why_not_recorded(attempt: Attempt, files: RunFiles) -> str:
    """Records another attempt of this job; returns why this is not possible, or nothing."""
    try:
        files.begin_again(attempt)
    except DdpHpcError as error:  # the disk is full, for example
        return str(error)
    return ""


def _run_attempt(
    attempt: Attempt,
    launch: Launch,
    clock: JobClock,
    files: RunFiles,
    settings: Settings,
    *,
    is_restart: bool,
) -> EndedAttempt:
    started = StartedAttempt(
        attempt=attempt,
        launcher=launch.launcher,
        writes_state=launch.writes_state,
        before=files.state(),
        progress=Progress(files.path / "progress", settings.progress),
    )
    limit_s = settings.idle_timeout_s
    variables = {
        # The trainer copies this to `refused` if ranks of another attempt still use the run directory.
        "DDP_HPC_THIS_ATTEMPT": attempt.key,
        "DDP_HPC_PROGRESS_FILE": str(started.progress.file),
    }
    if limit_s is not None:
        variables[IDLE_TIMEOUT] = f"{limit_s:g}"
    find_hang = IdleWatch(limit_s, files, attempt, started.progress).hang if limit_s is not None else str
    try:
        launcher = launch.run(variables, files, attempt, find_hang)
    except (OSError, DdpHpcError) as error:  # the disk is full, for example
        if not is_restart:
            raise
        complain(str(error))
        launcher = LauncherEnd(_NOT_STARTED)
    started = replace(started, saved_s=started.progress.saved_s())
    note(files.path, attempt.key, Moment.LAUNCHER_ENDED, checkpoint_s=started.saved_s)
    return settle(started, launcher, clock, files, settings)
