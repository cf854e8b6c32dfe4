"""The request for the job that resumes the run after the last attempt of this job."""

from __future__ import annotations

import hashlib
import shlex
import signal
import time
from contextlib import suppress

from ddp_hpc.base.errors import DdpHpcError
from ddp_hpc.base.run_outcomes import State
from ddp_hpc.queue.failed_nodes import failed_nodes
from ddp_hpc.queue.submission_ledger import Attempt, SubmissionRecord, record
from ddp_hpc.schedulers.running_job import Queued, RunningJob, Successor
from ddp_hpc.supervisor import decisions
from ddp_hpc.supervisor.ended_attempt import EndedAttempt
from ddp_hpc.supervisor.job_clock import JobClock
from ddp_hpc.supervisor.job_log import complain, say
from ddp_hpc.supervisor.run_files import RunFiles, SeenState
from ddp_hpc.supervisor.settings import Settings

# How long the scheduler is asked to accept another job, if it cannot be reached.
_RETRY_S = 300.0
# The time to write the last lines of the log.
_LAST_S = 1.0


def conclude(
    ended: EndedAttempt,
    attempt: Attempt,
    job: RunningJob,
    clock: JobClock,
    files: RunFiles,
    settings: Settings,
) -> int:
    """Requests another job if the run must be resumed, and returns the exit code of this job.

    `attempt` is the last one of this job, but with the first step of the first one.

    Raises:
        DdpHpcError: the job made no progress, so another job would not either.
    """
    if not isinstance(ended.outcome, int):
        return _NextJob(ended.outcome, attempt, job, clock, files, settings).request(ended.stop)
    if ended.refusal is not None:
        _NextJob(ended.after, attempt, job, clock, files, settings).refuse(ended.refusal)
    return ended.outcome


def conclude_unstarted(
    why_not: str,
    stop: decisions.SigtermCause,
    attempt: Attempt,
    job: RunningJob,
    clock: JobClock,
    files: RunFiles,
    settings: Settings,
    *,
    is_new: bool,
) -> int:
    """Does the same as `conclude` for a job that has started no ranks, which does not count as an attempt.

    `why_not` is what the check of nodes says. Only if a node `is_new` among the failed ones, which another
    job leaves out, is such a job requested.

    Raises:
        DdpHpcError: another job would probably not start ranks either.
    """
    # The step is no measure of the progress, because no rank has begun.
    reason = "" if stop else why_not
    state = SeenState(State.REQUEUE, attempt.first_step, reason, is_step_known=False)
    next_job = _NextJob(state, attempt, job, clock, files, settings, has_begun=False)
    if stop == "walltime":
        next_job.refuse(decisions.ENDED_BEFORE_START)
    elif not stop and not is_new:
        next_job.refuse(decisions.SAME_NODE_AGAIN)
    code = next_job.request(stop)
    return 128 + signal.SIGTERM if stop else code


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
        *,
        has_begun: bool = True,
    ) -> None:
        self._state, self._attempt, self._job, self._clock = state, attempt, job, clock
        self._files, self._settings = files, settings
        self._number = attempt.number + 1 if has_begun else attempt.number
        self._follows = "resumes the run" if has_begun else "begins"
        where = f"{decisions.at_step(state.step)}{'' if has_begun else ' before its ranks were started'}"
        self._stopped = f"stopped{where}{f': {state.reason}' if state.reason else ''}"

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
            raise DdpHpcError(f"{refusal.why}, and {self._stopped}; {refusal.remedy}: {command}")
        say(f"ddp-hpc: {self._stopped}; {refusal.why}; {refusal.remedy}: {command}")

    def _submit(self) -> None:
        command, number = self._resume_command(), self._number
        # If this process is killed now, the file says what is unknown.
        self._keep(
            command,
            "the job ended while requesting its successor, which may already be queued: check the queue",
        )
        request = Successor(
            script=self._files.script,
            attempt=number,
            until_s=time.monotonic() + max(0.0, self._clock.left_s(_RETRY_S) - _LAST_S),
            say=say,
            on_unreachable=lambda said: self._on_unreachable(said, command),
            leave_out=tuple(each.node for each in failed_nodes(self._files.path)),
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
        say(f"ddp-hpc: {self._stopped}; attempt {number} {self._follows} in {which}")

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
