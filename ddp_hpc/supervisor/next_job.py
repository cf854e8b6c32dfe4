"""The request for the job that resumes the run after the last attempt of this job."""

from __future__ import annotations

import hashlib
import shlex
import signal
import time
from contextlib import suppress
from dataclasses import dataclass

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


@dataclass(frozen=True, kw_only=True)
class _Stopped:
    """A run that has stopped, after the last attempt of this job."""

    state: SeenState
    attempt: Attempt
    has_begun: bool = True
    """Whether ranks were started. Otherwise, the start does not count as an attempt."""

    @property
    def next_number(self) -> int:
        """The number of the attempt that resumes the run."""
        return self.attempt.number + self.has_begun

    @property
    def follows(self) -> str:
        """What happens in the next job."""
        return f"attempt {self.next_number} {'resumes the run' if self.has_begun else 'begins'}"

    def __str__(self) -> str:
        where = "" if self.has_begun else " before its ranks were started"
        reason = f": {self.state.reason}" if self.state.reason else ""
        return f"stopped{decisions.at_step(self.state.step)}{where}{reason}"


class NextJob:
    """Requests the job that resumes the run after this one, or prints how a user resumes it."""

    def __init__(self, job: RunningJob, clock: JobClock, files: RunFiles, settings: Settings) -> None:
        self._job, self._clock, self._files, self._settings = job, clock, files, settings

    def conclude(self, ended: EndedAttempt, attempt: Attempt) -> int:
        """Requests another job if the run must be resumed, and returns the exit code of this job.

        `attempt` is the last one of this job, but with the first step of the first one.

        Raises:
            DdpHpcError: the job made no progress, so another job would not either.
        """
        if not isinstance(ended.outcome, int):
            return self._request(_Stopped(state=ended.outcome, attempt=attempt), ended.stop)
        if ended.refusal is not None:
            self._refuse(_Stopped(state=ended.after, attempt=attempt), ended.refusal)
        return ended.outcome

    def conclude_unstarted(
        self, attempt: Attempt, why_not: str, stop: decisions.SigtermCause, *, is_new: bool
    ) -> int:
        """Does the same for a job that has started no ranks, which does not count as an attempt.

        `why_not` is what the check of nodes says. Only if a node `is_new` among the failed ones, which
        another job leaves out, is such a job requested.

        Raises:
            DdpHpcError: another job would probably not start ranks either.
        """
        # The step is no measure of the progress, because no rank has begun.
        state = SeenState(State.REQUEUE, attempt.first_step, "" if stop else why_not, is_step_known=False)
        stopped = _Stopped(state=state, attempt=attempt, has_begun=False)
        if stop == "walltime":
            self._refuse(stopped, decisions.ENDED_BEFORE_START)
        elif not stop and not is_new:
            self._refuse(stopped, decisions.SAME_NODE_AGAIN)
        code = self._request(stopped, stop)
        return 128 + signal.SIGTERM if stop else code

    def _request(self, stopped: _Stopped, stop: decisions.SigtermCause) -> int:
        """Requests the job, or prints why none is requested and how to resume; returns the exit code.

        Raises:
            DdpHpcError: the attempt made no progress.
        """
        settings, attempt, after = self._settings, stopped.attempt, stopped.state
        assert after.state is not None
        refusal = decisions.why_no_job(
            stop,
            state=after.state,
            # A program that does not record its step is only resumed after progress.
            has_progressed=after.step > attempt.first_step or not after.is_step_known,
            attempt=attempt,
            max_attempts=settings.max_attempts,
            scheduler=settings.scheduler,
            may_submit=settings.may_submit,
        )
        if refusal is None:
            self._submit(stopped)
        else:
            self._refuse(stopped, refusal)
        return after.state.exit_code

    def _refuse(self, stopped: _Stopped, refusal: decisions.NoJob) -> None:
        """Prints why no job is requested and how to resume.

        Raises:
            DdpHpcError: the job has failed.
        """
        if not refusal.needs_command:
            say(f"ddp-hpc: {stopped}; {refusal.why}")
            return
        command = self._resume_command(refusal.submit_line)
        self._keep(stopped, command, refusal.why)
        if refusal.is_error:
            raise DdpHpcError(f"{refusal.why}, and {stopped}; {refusal.remedy}: {command}")
        say(f"ddp-hpc: {stopped}; {refusal.why}; {refusal.remedy}: {command}")

    def _submit(self, stopped: _Stopped) -> None:
        command = self._resume_command()
        # If this process is killed now, the file says what is unknown.
        self._keep(
            stopped,
            command,
            "the job ended while requesting its successor, which may already be queued: check the queue",
        )
        request = Successor(
            script=self._files.script,
            attempt=stopped.next_number,
            until_s=time.monotonic() + max(0.0, self._clock.left_s(_RETRY_S) - _LAST_S),
            say=say,
            on_unreachable=lambda said: self._on_unreachable(stopped, said, command),
            leave_out=tuple(each.node for each in failed_nodes(self._files.path)),
        )
        try:
            queued = self._job.resubmit(request)
        except (DdpHpcError, OSError) as error:
            self._keep(stopped, command, f"no successor could be queued: {error}")
            complain(f"{stopped}, and no successor could be queued: {error}; to resume: {command}")
            return
        self._files.remove_resume()
        if queued.job_id == self._job.job_id:
            say(f"ddp-hpc: {stopped}; this job is requeued, and {stopped.follows}")
        else:
            self._record(queued, after=stopped.attempt.job_id)
            say(f"ddp-hpc: {stopped}; {stopped.follows} in job {queued.job_id}")

    def _record(self, queued: Queued, after: str) -> None:
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
                    after=after,
                ),
            )

    def _on_unreachable(self, stopped: _Stopped, said: str, command: str) -> None:
        self._keep(stopped, command, f"the scheduler could not be reached: {said}")
        left_s = self._clock.left_s(_RETRY_S)
        say(
            f"ddp-hpc: {stopped}; the scheduler could not be reached: {said}; retrying for up to "
            f"{left_s:.0f} s; if no other job is queued by then, resume with: {command}"
        )

    def _keep(self, stopped: _Stopped, command: str, why: str) -> None:
        with suppress(DdpHpcError):  # the disk is full, for example; the log has the command, too
            self._files.write_resume(command, f"attempt {stopped.attempt.number} {stopped}; {why}")

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
