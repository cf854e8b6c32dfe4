"""Determines and records how an attempt ended."""

from __future__ import annotations

import signal
from contextlib import suppress
from dataclasses import dataclass, replace

from ddp_hpc.base.attempt_end import AttemptEnd, rank_0_end
from ddp_hpc.base.errors import EXIT_WRONG_REQUEST, DdpHpcError
from ddp_hpc.base.run_outcomes import Cause, State
from ddp_hpc.queue.submission_ledger import Attempt, is_cancelled
from ddp_hpc.supervisor import decisions
from ddp_hpc.supervisor.ended_attempt import EndedAttempt
from ddp_hpc.supervisor.external_program_state import Progress, state_of_program
from ddp_hpc.supervisor.job_clock import JobClock
from ddp_hpc.supervisor.job_log import complain, say
from ddp_hpc.supervisor.launcher_process import LauncherEnd
from ddp_hpc.supervisor.run_files import RunFiles, SeenState
from ddp_hpc.supervisor.settings import Settings


@dataclass(frozen=True, kw_only=True)
class StartedAttempt:
    """An attempt whose launcher was started."""

    attempt: Attempt
    launcher: str
    writes_state: bool
    """Whether the program is `ddp_hpc.train`, which always writes its final state."""
    before: SeenState
    """The state of the run before the attempt."""
    progress: Progress
    saved_s: float | None = None
    """The result of `Progress.saved_s` after the launcher has ended."""


def settle(
    started: StartedAttempt, launcher: LauncherEnd, clock: JobClock, files: RunFiles, settings: Settings
) -> EndedAttempt:
    """Determines and records how the attempt ended."""
    attempt, before, code = started.attempt, started.before, launcher.code
    files.check()
    # If this node was disconnected, the scheduler may have restarted the job elsewhere. That attempt now owns
    # the run.
    if not files.is_last(attempt):
        return EndedAttempt(attempt=attempt, launcher=launcher, after=SeenState(), outcome=code)
    if launcher.lost_nodes:
        files.write_end(attempt, _end_of_lost_node(launcher.lost_nodes[0], launcher.silent_s))
    after, recorded = files.state(), files.end(attempt)
    has_begun = files.has_begun(attempt, before, after)
    if decisions.is_refusal(code, recorded, before, after):
        with suppress(DdpHpcError):  # the disk is full, for example
            files.withdraw()
        say(
            "ddp-hpc: the ranks refused to start, so this start does not count as an attempt; no other job "
            "is submitted"
            f"{decisions.at_step(after.step, '; the run is at step ')}"
        )
        refused = AttemptEnd(cause=Cause.REFUSED, exit_code=EXIT_WRONG_REQUEST, reason="")
        return EndedAttempt(
            attempt=attempt, launcher=launcher, after=after, outcome=EXIT_WRONG_REQUEST, end=refused
        )
    stop = why_stopped(attempt, clock, files, has_failed=bool(code))
    writes_no_state = after.stamp == before.stamp
    if writes_no_state:
        program = _program_end(started, launcher, recorded, files)
        after = _write_state(started, launcher, program, files, settings, at_deadline=stop == "walltime")
        recorded = decisions.end_of_program(program, after)
        files.write_end(attempt, recorded)
    elif not after.state:  # the file is damaged, or was written by other software
        return EndedAttempt(attempt=attempt, launcher=launcher, after=after, outcome=code)
    elif recorded is None and after.state is State.RUNNING:
        recorded = decisions.end_without_record(code, started.launcher)
        files.write_end(attempt, recorded)
    # Ranks can record nothing, such as those of other programs under torchrun.
    is_complete = after.state is not None and after.state.is_complete
    has_begun = has_begun or is_complete
    outcome = decisions.outcome(code, recorded, attempt.first_step, after)
    refusal = None
    is_known = bool(launcher.lost_nodes) or launcher.has_hung
    if writes_no_state and launcher.was_ended and not is_known and after.state in State.ending_in("failure"):
        refusal = decisions.LAUNCHER_HUNG
    elif outcome and after.state is State.RUNNING and after.step:
        refusal = decisions.NOTHING_SAVED
    return EndedAttempt(
        attempt=attempt,
        launcher=launcher,
        after=after,
        outcome=outcome,
        end=recorded,
        stop=stop,
        refusal=refusal,
        has_begun=has_begun,
    )


def _end_of_lost_node(host: str, silent_s: float) -> AttemptEnd:
    reason = f"{host} does not answer"
    return AttemptEnd(cause=Cause.LOST_RANK, exit_code=1, reason=reason, host=host, silent_s=silent_s)


def why_stopped(
    attempt: Attempt, clock: JobClock, files: RunFiles, *, has_failed: bool = True
) -> decisions.SigtermCause:
    """Returns why the scheduler ends this job; empty if it does not, or this is unknown.

    It may have ended only the ranks until now, so after a failure it is asked even without SIGTERM.
    """
    is_signalled = signal.SIGTERM in signal.sigpending()
    if clock.stopped_s is None and (is_signalled or (has_failed and clock.is_ending())):
        clock.stop()
    return decisions.why_stopped(
        clock.stopped_s,
        clock.stop_cause() if clock.stopped_s is not None else "unknown",
        clock.end_s,
        is_cancelled=is_cancelled(files.path, attempt.job_id),
    )


def settle_repeated(ended: EndedAttempt, files: RunFiles) -> EndedAttempt:
    """Records that the run fails at the same place each time, so that no job resumes it by itself."""
    end = ended.end
    assert end is not None
    where = "after the same checkpoint" if end.step is None else f"in step {end.step}"
    reason = f"the run has failed twice {where}: {end.reason}"
    after = replace(ended.after, state=State.FAILED, reason=reason)
    store(after, files)
    complain(reason)
    return replace(ended, after=after, outcome=end.exit_code, refusal=None)


def settle_as_before(earlier: EndedAttempt, last: EndedAttempt, files: RunFiles) -> EndedAttempt:
    """Returns to the end of the attempt before, after a restart that has not got further."""
    store(earlier.after if isinstance(earlier.outcome, int) else earlier.outcome, files)
    return replace(earlier, attempt=last.attempt, stop=last.stop)


def _program_end(
    started: StartedAttempt, launcher: LauncherEnd, recorded: AttemptEnd | None, files: RunFiles
) -> AttemptEnd:
    try:
        rank_0, is_recorded = rank_0_end(files.path, started.attempt.key), True
    except LookupError:
        rank_0, is_recorded = None, False
    return decisions.program_end(
        launcher=started.launcher,
        code=launcher.code,
        was_ended=launcher.was_ended,
        writes_state=started.writes_state,
        failure=recorded if recorded is not None and recorded.cause.is_failure else None,
        rank_0=rank_0,
        is_recorded=is_recorded,
    )


def _write_state(
    started: StartedAttempt,
    launcher: LauncherEnd,
    program: AttemptEnd,
    files: RunFiles,
    settings: Settings,
    *,
    at_deadline: bool,
) -> SeenState:
    """Writes and returns the state of a run whose program did not write a state."""
    state = state_of_program(
        program,
        started.attempt,
        started.progress.step(),
        has_progressed=started.saved_s is not None,
        at_deadline=settings.signal_lead_s is not None and (launcher.was_signalled_early or at_deadline),
    )
    store(state, files)
    has_failed = state.state is not None and state.state.is_failure
    # The log of the launcher says the same about a program that exited with this code, and that of this
    # process about a hang.
    is_known = program.cause is Cause.EXITED and program.exit_code == launcher.code
    if has_failed and not is_known and not launcher.has_hung:
        complain(state.reason)
    return state


def store(state: SeenState, files: RunFiles) -> None:
    """Writes the state, or prints it if it cannot be written."""
    try:
        files.write_state(state)
    except DdpHpcError as error:  # for example, the disk is full
        step = decisions.at_step(state.step, " ")
        complain(f"{error}; the state of the run is: {state.state}{step} {state.reason}")
