"""What the supervisor decides at the start and at the end of an attempt, from the files of the run."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from ddp_hpc.base.attempt_end import AttemptEnd
from ddp_hpc.base.errors import EXIT_DONE, EXIT_FAILED, EXIT_REQUEUE, DdpHpcError, RequestError
from ddp_hpc.base.run_outcomes import Cause, State
from ddp_hpc.queue.submission_ledger import Attempt
from ddp_hpc.schedulers.running_job import StopCause
from ddp_hpc.schedulers.scheduler import Scheduler
from ddp_hpc.supervisor.run_files import SeenState

# If the scheduler does not say why it sent a signal: it ends a job at most this long before the end of its
# walltime. An earlier signal comes from a user, or from a preemption.
_NEAR_END_S = 30.0
_TERMINATED = 128 + signal.SIGTERM


@dataclass(frozen=True)
class NothingToDo:
    """The job ends without starting ranks."""

    code: int
    message: str


def begin_attempt(
    job_id: str, seen: SeenState, last: Attempt | None, environ: Mapping[str, str], max_attempts: int
) -> Attempt | NothingToDo:
    """Returns this attempt, or the reason why the job has nothing to do.

    Raises:
        RequestError: DDP_HPC_ATTEMPT is not a positive integer.
        DdpHpcError: the previous attempt failed or made no progress.
    """
    text = environ.get("DDP_HPC_ATTEMPT") or "1"
    if not (text.isascii() and text.isdecimal() and len(text) <= 7 and text[0] != "0"):
        raise RequestError(
            f"DDP_HPC_ATTEMPT is {text[:80]!r}, but must be a positive integer; unset the variable"
        )
    # A job whose ID is already in the file was requeued. With PBS, this is the only way to detect a requeue.
    is_requeued = last is not None and last.job_id == job_id
    number = last.number + 1 if last is not None and is_requeued else int(text)
    attempt = Attempt(number=number, job_id=job_id, first_step=seen.step, at_s=int(time.time()))
    if number == 1:
        return attempt
    state, reason = seen.state or State.RUNNING, f": {seen.reason}" if seen.reason else ""
    if state.is_complete:
        what = f"the training of {seen.step} steps is complete" if seen.step else "the program has completed"
        return NothingToDo(state.exit_code, f"{what}; attempt {number} has nothing to do")
    is_resumed = state.is_resumed_after_requeue if is_requeued else state.is_resumed_by_job
    if not is_resumed and state.is_failure:
        raise DdpHpcError(f"the previous attempt failed{reason}; {state.how_to_resume()}")
    if not is_resumed:
        what = f"the state of the run is {state}{at_step(seen.step)}{reason}"
        return NothingToDo(state.exit_code, f"{what}; to resume it, {state.how_to_resume()}")
    # A program that does not record its step is only resumed after progress.
    if not is_requeued and seen.is_step_known and seen.step <= (last.first_step if last else 0):
        raise DdpHpcError(
            f"the previous attempt made no progress, and the run is still at step {seen.step}; look for the "
            "reason in the log of that attempt, then submit the script again"
        )
    if number > max_attempts:
        return NothingToDo(
            EXIT_REQUEUE,
            f"the run is{at_step(seen.step) or ' not complete'} after {max_attempts} attempts, the maximum "
            "(--max-attempts); to resume it, submit the script again",
        )
    return attempt


def next_attempt(attempt: Attempt, after: SeenState) -> Attempt:
    """Returns the attempt that resumes the run in the same job."""
    return replace(attempt, number=attempt.number + 1, first_step=after.step, at_s=int(time.time()))


def is_refusal(code: int, end: AttemptEnd | None, before: SeenState, after: SeenState) -> bool:
    """Returns whether the ranks refused to start, for example because others use the run directory.

    Such a start is not an attempt, and the state may have been written by the other ranks. Without a record,
    the launcher's exit code tells.
    """
    if end is not None:
        return end.cause is Cause.REFUSED
    is_wrong = code == Cause.REFUSED.exit_code
    return is_wrong and (after.stamp == before.stamp or after.state is None or not after.state.is_failure)


def program_end(
    *,
    launcher: str,
    code: int,
    was_ended: bool,
    writes_state: bool,
    failure: AttemptEnd | None,
    rank_0: int | None,
    is_recorded: bool,
) -> AttemptEnd:
    """Returns how a program that did not write a state ended, from the launcher's exit code and its ranks.

    `was_ended` is whether the supervisor had to end the launcher. `failure` is the recorded failure of a
    rank, and `rank_0` the exit code of rank 0; with `is_recorded`, None means that rank 0 did not end by
    itself.

    After rank 0 has exited with 75, srun and mpiexec can terminate other ranks, and exit with their code.
    """
    is_stopped = rank_0 == EXIT_REQUEUE
    if failure is not None and not (is_stopped and failure.exit_code == _TERMINATED):
        return failure
    if rank_0 is not None and (was_ended or is_stopped):
        return _exited(rank_0, f"rank 0 exited with code {rank_0}")
    if code == 0 and (writes_state or (is_recorded and rank_0 is None)):
        missing = (
            "the training has not written its final state" if writes_state else "rank 0 reported no exit code"
        )
        reason = f"{launcher} exited with code 0, but {missing}; look for the cause in the log"
        return AttemptEnd(cause=Cause.LOST_RANK, exit_code=EXIT_FAILED, reason=reason)
    if was_ended and code:
        reason = f"{launcher} did not end and was killed; look in the log for ranks that hang"
        return AttemptEnd(cause=Cause.HANG, exit_code=code, reason=reason)
    return _exited(code, f"exit code {code}" if code else "")


def _exited(code: int, reason: str) -> AttemptEnd:
    causes = {EXIT_DONE: Cause.DONE, EXIT_REQUEUE: Cause.STOPPED}
    return AttemptEnd(cause=causes.get(code, Cause.EXITED), exit_code=code, reason=reason)


def end_of_program(program: AttemptEnd, after: SeenState) -> AttemptEnd:
    """Returns the end of an attempt whose program has led to the state `after`."""
    if after.state is not None and after.state.is_stopped:
        return replace(program, cause=Cause.STOPPED, reason=after.reason)
    # For example, exit code 75 without a checkpoint.
    if after.state is not None and after.state.is_failure and not program.cause.is_failure:
        return replace(program, cause=Cause.FAILED, reason=after.reason)
    return program


def end_without_record(code: int, launcher: str) -> AttemptEnd:
    """Returns the end of an attempt in which a rank or a node was lost before it could report a reason.

    mpiexec exits with 0 after that, if the lost rank has exited with 0.
    """
    reason = f"{launcher} exited with code {code}, and no rank reported a reason"
    return AttemptEnd(cause=Cause.LOST_RANK, exit_code=code or EXIT_FAILED, reason=reason)


def outcome(code: int, end: AttemptEnd | None, first_step: int, after: SeenState) -> SeenState | int:
    """Returns the state of a run that has stopped and can be resumed, or the exit code of the job.

    `after` was written by this attempt, and `end` is how it ended; None if the program has written only the
    state. Launchers change exit codes, so both take precedence over `code`.
    """
    if after.state is State.RUNNING and end is not None and after.step > first_step and end.cause.may_resume:
        return replace(after, state=State.REQUEUE, reason=end.reason)
    if after.state is not None and after.state.is_stopped:
        return after
    if after.state is not None and after.state.is_complete:
        return after.state.exit_code
    return end.exit_code if end is not None else code or EXIT_FAILED


def at_step(step: int, text: str = " at step ") -> str:
    """Returns `text` and the step; empty for 0, which stands for a step that is not known."""
    return f"{text}{step}" if step else ""


SigtermCause = StopCause | Literal[""]
"""Why the job received SIGTERM; empty if it received none."""


def why_stopped(
    stopped_s: float | None, cause: StopCause, end_s: float | None, *, is_cancelled: bool
) -> SigtermCause:
    """Returns why the job was stopped, from the scheduler's answer `cause` or from the time of the signal.

    `is_cancelled` is whether `ddp-hpc cancel` has cancelled the job.
    """
    if is_cancelled:
        return "cancelled"
    if stopped_s is None:
        return ""
    if cause != "unknown":
        return cause
    return "walltime" if end_s is not None and stopped_s >= end_s - _NEAR_END_S else "unknown"


@dataclass(frozen=True, kw_only=True)
class NoJob:
    """Why no other job is requested, and how a user resumes the run.

    `submit_line` replaces the usual submit command; `is_error` means that the job has failed.
    """

    why: str
    remedy: str = "to resume"
    submit_line: str = ""
    needs_command: bool = True
    is_error: bool = False


NOTHING_SAVED = NoJob(why="this attempt has saved no snapshot, so no other job is submitted")
"""A rank was lost before the first snapshot of the attempt, perhaps at the same step as before."""
LAUNCHER_HUNG = NoJob(
    why="no other job is submitted, because the ranks may hang again", remedy="to resume anyway"
)
"""The launcher had to be killed although the program has not written a state."""
ENDED_BEFORE_START = NoJob(
    why="this job had too little time to check its nodes",
    remedy="increase the walltime, then resume with",
    is_error=True,
)
SAME_NODE_AGAIN = NoJob(why="this job was allocated a node that had failed before", is_error=True)
"""The next job would probably get it, too."""


def why_no_job(
    stop: SigtermCause,
    *,
    state: State,
    has_progressed: bool,
    attempt: Attempt,
    max_attempts: int,
    scheduler: Scheduler,
    may_submit: bool,
) -> NoJob | None:
    """Returns why this job does not request another one; None if it does."""
    title, nothing = scheduler.title, "so no other job is submitted"
    if not state.is_resumed_by_job:
        return NoJob(
            why=f"the state of the run is {state}, {nothing}", remedy=state.how_to_resume("resume it with")
        )
    if stop == "requeued":
        return NoJob(why=f"{title} has requeued this job, which will resume the run", needs_command=False)
    if stop == "cancelled":
        return NoJob(why=f"the job was cancelled, {nothing}")
    if stop == "preempted":
        return NoJob(
            why=f"the job was preempted, {nothing}", remedy=f"if {title} does not requeue it, resume with"
        )
    if stop == "unknown":
        return NoJob(why=f"the job received SIGTERM before the end of its walltime, {nothing}")
    if not has_progressed:
        why = f"attempt {attempt.number} made no progress: it began at step {attempt.first_step}"
        return NoJob(why=why, remedy="increase the walltime, then resume with", is_error=True)
    if attempt.number >= max_attempts:
        return NoJob(why=f"attempt {attempt.number} was the last that --max-attempts allows")
    if not scheduler.inside_job.can_requeue:
        return NoJob(why=f"no successor is submitted under {title}")
    if not may_submit:
        why, remedy = "compute nodes cannot submit jobs at this site", "to resume, run on a login node"
        return NoJob(why=why, remedy=remedy, submit_line="ddp-hpc submit")
    return None


def writes_its_state(argv: Sequence[str]) -> bool:
    """Returns whether the launch line starts `ddp_hpc.train`, which always writes its final state."""
    return "ddp_hpc.train" in argv or ("ddp-hpc", "train") in pairwise(argv)
