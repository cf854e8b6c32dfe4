"""The end of an attempt: how the run ended, and which job resumes it after the last attempt of this job."""

from __future__ import annotations

import hashlib
import shlex
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, replace

from ddp_hpc.base.attempt_end import AttemptEnd, rank_0_end
from ddp_hpc.base.errors import EXIT_WRONG_REQUEST, DdpHpcError
from ddp_hpc.base.run_outcomes import Cause, State
from ddp_hpc.queue.submission_ledger import Attempt, SubmissionRecord, is_cancelled, record
from ddp_hpc.schedulers.running_job import Queued, RunningJob, Successor
from ddp_hpc.supervisor import decisions
from ddp_hpc.supervisor.external_program_state import Progress, state_of_program
from ddp_hpc.supervisor.job_clock import JobClock
from ddp_hpc.supervisor.job_log import complain, say
from ddp_hpc.supervisor.launcher_process import LauncherEnd
from ddp_hpc.supervisor.run_files import RunFiles, SeenState
from ddp_hpc.supervisor.settings import Settings

# How long the scheduler is asked to accept another job, if it cannot be reached.
_RETRY_S = 300.0
# The time to write the last lines of the log.
_LAST_S = 1.0


@dataclass(frozen=True, kw_only=True)
class EndedLauncher:
    """An attempt whose launcher has ended."""

    launcher: str
    writes_state: bool
    """Whether the program is `ddp_hpc.train`, which always writes its final state."""
    end: LauncherEnd
    attempt: Attempt
    before: SeenState
    """The state of the run before the attempt."""
    progress: Progress


@dataclass(frozen=True, kw_only=True)
class Settled:
    """The recorded end of an attempt, and what follows if it is the last one of this job.

    `after` is the state of the run and `end` how the attempt ended; None without a record. `outcome` is the
    state that another job can resume, or the exit code of this job; with `refusal`, a user can resume it.
    `may_restart` is whether nothing prevents this job from starting the ranks again, `has_begun` whether
    ranks are known to have begun. `was_launcher_killed` is whether the launcher, a rank or an agent of
    torchrun was killed: it is then not a user who stops ranks with SIGTERM.
    """

    after: SeenState
    outcome: SeenState | int
    end: AttemptEnd | None = None
    stop: decisions.SigtermCause = ""
    refusal: decisions.NoJob | None = None
    may_restart: bool = False
    has_begun: bool = False
    was_launcher_killed: bool = False


def settle(ended: EndedLauncher, clock: JobClock, files: RunFiles, settings: Settings) -> Settled:
    """Determines and records how the attempt ended."""
    code, attempt, before = ended.end.code, ended.attempt, ended.before
    files.check()
    # If this node was disconnected, the scheduler may have restarted the job elsewhere. That attempt now owns
    # the run.
    if not files.is_last(attempt):
        return Settled(after=SeenState(), outcome=code)
    after, recorded = files.state(), files.end(attempt)
    has_begun = files.has_begun(attempt, before, after)
    if decisions.is_refusal(code, recorded, before, after):
        with suppress(DdpHpcError):  # the disk is full, for example
            files.withdraw()
        say(
            "ddp-hpc: this start was refused and does not count as an attempt; nothing is submitted"
            f"{decisions.at_step(after.step, '; the run is at step ')}"
        )
        return Settled(after=after, outcome=EXIT_WRONG_REQUEST)
    stop = why_stopped(attempt, clock, files)
    writes_no_state = after.stamp == before.stamp
    if writes_no_state:
        program = _program_end(ended, recorded, files)
        after = _write_state(ended, program, files, settings, at_deadline=stop == "walltime")
        recorded = decisions.end_of_program(program, after)
        files.write_end(attempt, recorded)
    elif not after.state:  # the file is damaged, or was written by other software
        return Settled(after=after, outcome=code)
    elif recorded is None and after.state is State.RUNNING:
        recorded = decisions.end_without_record(code, ended.launcher)
        files.write_end(attempt, recorded)
    outcome = decisions.outcome(code, recorded, attempt.first_step, after)
    refusal = None
    has_hung = writes_no_state and ended.end.was_ended and not ended.end.lost_nodes
    if has_hung and after.state in State.ending_in("failure"):
        refusal = decisions.LAUNCHER_HUNG
    elif outcome and after.state is State.RUNNING and after.step:
        refusal = decisions.NOTHING_SAVED
    was_killed = ended.end.code == 128 + signal.SIGKILL
    return Settled(
        after=after,
        outcome=outcome,
        end=recorded,
        stop=stop,
        refusal=refusal,
        has_begun=has_begun,
        was_launcher_killed=was_killed,
        # Ranks whose launcher had to be killed can still be running on other nodes. After the loss of a node,
        # they have been ended.
        may_restart=(not (was_killed and ended.end.was_ended) or bool(ended.end.lost_nodes))
        and not stop
        and not ended.end.was_signalled_early
        and not ended.end.has_left_ranks
        and refusal is not decisions.LAUNCHER_HUNG,
    )


def why_stopped(attempt: Attempt, clock: JobClock, files: RunFiles) -> decisions.SigtermCause:
    """Returns why this job has received SIGTERM; empty if it has received none until now."""
    if clock.stopped_s is None and signal.SIGTERM in signal.sigpending():
        clock.stop()
    return decisions.why_stopped(
        clock.stopped_s,
        clock.stop_cause() if clock.stopped_s is not None else "unknown",
        clock.end_s,
        is_cancelled=is_cancelled(files.path, attempt.job_id),
    )


def conclude(
    settled: Settled, attempt: Attempt, job: RunningJob, clock: JobClock, files: RunFiles, settings: Settings
) -> int:
    """Requests another job if the run must be resumed, and returns the exit code of this job.

    `attempt` is the last one of this job, but with the first step of the first one.

    Raises:
        DdpHpcError: the job made no progress, so another job would not either.
    """
    if not isinstance(settled.outcome, int):
        return _NextJob(settled.outcome, attempt, job, clock, files, settings).request(settled.stop)
    if settled.refusal is not None:
        _NextJob(settled.after, attempt, job, clock, files, settings).refuse(settled.refusal)
    return settled.outcome


def settle_repeated(settled: Settled, files: RunFiles) -> Settled:
    """Records that the run fails at the same place each time, so that no job resumes it by itself."""
    end = settled.end
    assert end is not None
    where = "after the same checkpoint" if end.step is None else f"in step {end.step}"
    reason = f"the run fails {where} each time: {end.reason}"
    after = replace(settled.after, state=State.FAILED, reason=reason)
    store(after, files)
    complain(reason)
    return replace(settled, after=after, outcome=end.exit_code, refusal=None)


def settle_as_before(earlier: Settled, stop: decisions.SigtermCause, files: RunFiles) -> Settled:
    """Returns to the end of the attempt before, after a restart that has not got further."""
    store(earlier.after if isinstance(earlier.outcome, int) else earlier.outcome, files)
    return replace(earlier, stop=stop)


def _program_end(ended: EndedLauncher, recorded: AttemptEnd | None, files: RunFiles) -> AttemptEnd:
    key = ended.attempt.key
    try:
        rank_0, is_recorded = rank_0_end(files.path, key), True
    except LookupError:
        rank_0, is_recorded = None, False
    return decisions.program_end(
        launcher=ended.launcher,
        code=ended.end.code,
        was_ended=ended.end.was_ended,
        writes_state=ended.writes_state,
        failure=recorded if recorded is not None and recorded.cause.is_failure else None,
        rank_0=rank_0,
        is_recorded=is_recorded,
    )


def _write_state(
    ended: EndedLauncher, program: AttemptEnd, files: RunFiles, settings: Settings, *, at_deadline: bool
) -> SeenState:
    """Writes and returns the state of a run whose program did not write a state."""
    state = state_of_program(
        program,
        ended.attempt,
        ended.progress,
        at_deadline=settings.signal_lead_s is not None and (ended.end.was_signalled_early or at_deadline),
    )
    store(state, files)
    has_failed = state.state is not None and state.state.is_failure
    # The log of the launcher says the same about a program that exited with this code.
    is_plain = program.cause is Cause.EXITED and program.exit_code == ended.end.code
    if has_failed and not is_plain:
        complain(state.reason)
    return state


def store(state: SeenState, files: RunFiles) -> None:
    """Writes the state, or prints it if it cannot be written."""
    try:
        files.write_state(state)
    except DdpHpcError as error:  # for example, the disk is full
        step = decisions.at_step(state.step, " ")
        complain(f"{error}; the state of the run is: {state.state}{step} {state.reason}")


class _NextJob:
    """The request for the job that resumes the run."""

    def __init__(
        self,
        state: SeenState,
        attempt: Attempt,
        job: RunningJob,
        clock: JobClock,
        files: RunFiles,
        settings: Settings,
    ) -> None:
        self._state, self._attempt, self._job, self._clock = state, attempt, job, clock
        self._files, self._settings = files, settings
        reason = f": {state.reason}" if state.reason else ""
        self._stopped = f"stopped{decisions.at_step(state.step)}{reason}"

    def request(self, stop: decisions.SigtermCause) -> int:
        """Requests the job, or prints why none is requested and how to resume; returns the exit code.

        Raises:
            DdpHpcError: the attempt made no progress.
        """
        settings, attempt = self._settings, self._attempt
        state = self._state.state
        assert state is not None
        refusal = decisions.why_no_job(
            stop,
            state=state,
            # A program that does not record its step is only resumed after progress.
            has_progressed=self._state.step > attempt.first_step or not self._state.is_step_known,
            attempt=attempt,
            max_attempts=settings.max_attempts,
            scheduler=settings.scheduler,
            may_submit=settings.may_submit,
        )
        if refusal is None:
            self._submit()
        else:
            self.refuse(refusal)
        return state.exit_code

    def refuse(self, refusal: decisions.NoJob) -> None:
        """Prints why no job is requested and how to resume.

        Raises:
            DdpHpcError: the job has failed.
        """
        if not refusal.needs_command:
            say(f"ddp-hpc: {self._stopped}; {refusal.why}")
            return
        command = self._resume_command(refusal.submit_line)
        self._keep(command, refusal.why)
        if refusal.is_error:
            raise DdpHpcError(f"{refusal.why} and {self._stopped}; {refusal.remedy}: {command}")
        say(f"ddp-hpc: {self._stopped}; {refusal.why}; {refusal.remedy}: {command}")

    def _submit(self) -> None:
        command, number = self._resume_command(), self._attempt.number + 1
        # If this process is killed now, the file says what is unknown.
        self._keep(
            command, "the job ended while it requested its successor, which may be queued: check the queue"
        )
        request = Successor(
            script=self._files.script,
            attempt=number,
            until_s=time.monotonic() + max(0.0, self._clock.left_s(_RETRY_S) - _LAST_S),
            say=say,
            on_unreachable=lambda said: self._on_unreachable(said, command),
        )
        try:
            queued = self._job.resubmit(request)
        except (DdpHpcError, OSError) as error:
            self._keep(command, f"no successor could be queued: {error}")
            complain(f"{self._stopped}, and no successor could be queued: {error}; to resume: {command}")
            return
        self._files.remove_resume()
        which = "this job"
        if queued.job_id != self._job.job_id:
            which = f"job {queued.job_id}"
            self._record(queued)
        say(f"ddp-hpc: {self._stopped}; attempt {number} resumes the run in {which}")

    def _record(self, queued: Queued) -> None:
        job, script = self._job, self._files.script
        with suppress(DdpHpcError, OSError):  # the disk is full, for example
            record(
                self._files.path,
                SubmissionRecord(
                    job_id=queued.job_id,
                    scheduler=self._settings.scheduler.name,
                    argv=tuple(queued.argv),
                    script=str(script),
                    sha256=hashlib.sha256(script.read_bytes()).hexdigest(),
                    work_dir=str(job.work_dir),
                    after=self._attempt.job_id,
                ),
            )

    def _on_unreachable(self, said: str, command: str) -> None:
        self._keep(command, f"the scheduler could not be reached: {said}")
        left_s = self._clock.left_s(_RETRY_S)
        say(
            f"ddp-hpc: {self._stopped}; the scheduler could not be reached: {said}; retrying for up to "
            f"{left_s:.0f} s; if no other job is queued by then, resume with: {command}"
        )

    def _keep(self, command: str, why: str) -> None:
        with suppress(DdpHpcError):  # the disk is full, for example; the log has the command, too
            self._files.write_resume(command, f"attempt {self._attempt.number} {self._stopped}; {why}")

    def _resume_command(self, submit_line: str = "") -> str:
        """Returns the shell command that resumes the run; `submit_line` replaces the submit command."""
        files, job = self._files, self._job
        if submit_line:
            words = f"{submit_line} {shlex.quote(str(files.script))}"
        else:
            line = self._settings.scheduler.submit_program
            scheduler = self._settings.scheduler
            index = scheduler.inside_job.array_index(job.environ)
            options = [*(scheduler.commands.array_options(index) if index else ()), *job.submit_options()]
            words = " ".join(filter(None, (line, shlex.join([*options, str(files.script), *job.arguments]))))
        return f"cd {shlex.quote(str(job.work_dir))} && {words}"
