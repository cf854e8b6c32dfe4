"""What the supervisor decides at the start and at the end of an attempt, from the files of the run."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ddp_hpc.errors import EXIT_DONE, EXIT_FAILED, EXIT_REQUEUE, DdpHpcError, RequestError
from ddp_hpc.jobs.submission_ledger import Attempt
from ddp_hpc.supervisor.run_files import SeenState

# A scheduler ends a job at most this long before the end of its walltime. An earlier signal comes from a
# user, or from a preemption, after which the scheduler itself requeues the job.
END_MARGIN_S = 30.0


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
    if seen.state == "done":
        what = f"the training of {seen.step} steps is complete" if seen.step else "the program has completed"
        return NothingToDo(EXIT_DONE, f"{what}; attempt {number} has nothing to do")
    # A requeued job runs even after a failure: the requeue was requested, and the failure may have been
    # caused by a lost node.
    if not is_requeued:
        again = "then submit the script again"
        if seen.state == "failed":
            reason = f": {seen.reason}" if seen.reason else ""
            raise DdpHpcError(f"the previous attempt failed{reason}; fix the cause, {again}")
        if seen.step <= (last.first_step if last else 0):
            raise DdpHpcError(
                f"the previous attempt made no progress, and the run is still at step {seen.step}; look for "
                f"the reason in the log of that attempt, {again}"
            )
    if number > max_attempts:
        return NothingToDo(
            EXIT_REQUEUE,
            f"the run is at step {seen.step} after {max_attempts} attempts, the maximum (--max-attempts); to "
            "resume it, submit the script again",
        )
    return attempt


def is_refusal(code: int, before: SeenState, after: SeenState) -> bool:
    """Returns whether the ranks refused to start, for example because others use the run directory.

    Such a start is not an attempt, and the state may have been written by the other ranks.
    """
    return code == RequestError.exit_code and (after.stamp == before.stamp or after.state != "failed")


def outcome(code: int, first_step: int, after: SeenState) -> SeenState | int:
    """Returns the state of a run that another job can resume, or the exit code of the job.

    `after` was written by this attempt. Launchers change exit codes, so `after` takes precedence over `code`.
    """
    if after.state == "done":
        return EXIT_DONE
    if after.state == "running" and code and after.step > first_step:
        # A rank or a node was lost before it could report a reason, but this attempt has saved a snapshot.
        reason = f"the launcher exited with code {code} and no rank reported a reason"
        return replace(after, state="requeue", reason=reason)
    if after.state != "requeue":
        return code or EXIT_FAILED
    return after


def was_stopped_early(stopped_s: float, deadline_s: float | None) -> bool:
    """Returns whether a signal arrived before the end of the walltime."""
    return deadline_s is None or stopped_s < deadline_s - END_MARGIN_S
