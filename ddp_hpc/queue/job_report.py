"""Combines what the scheduler, the run directory and the log contain about one job."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from ddp_hpc.base.attempt_end import read_end
from ddp_hpc.base.errors import EXIT_REQUEUE, DdpHpcError, RequestError
from ddp_hpc.base.run_outcomes import State
from ddp_hpc.base.run_state import RunState, read_state, state_path
from ddp_hpc.queue import submission_ledger as ledger
from ddp_hpc.queue.causes_in_log import not_saved_in, warning_in
from ddp_hpc.queue.failed_nodes import FailedNode, failed_nodes
from ddp_hpc.queue.first_failure import last_attempt
from ddp_hpc.queue.log_files import age_s, is_there, log_paths, read_head, read_tail, usual_logs
from ddp_hpc.queue.post_mortem import Evidence, PostMortem, advice_while_waiting, examine
from ddp_hpc.queue.run_cost import RunCost, run_cost
from ddp_hpc.queue.run_directories import find_run_dir, runs_in
from ddp_hpc.queue.training_progress import Progress, progress_in
from ddp_hpc.schedulers.client import read_job, read_jobs
from ddp_hpc.schedulers.job_state import SLUID, JobState, check_job_id, same_job

# The scheduler is queried once per run, so this limits the number of queries.
_MAX_RUNS = 20


@dataclass(frozen=True, kw_only=True)
class JobReport:
    """The status of one job.

    `verdict` is waiting, cancelled, unknown, or the word of a `State`. `job` is None if the scheduler no
    longer knows the job. `state` is None if the run directory contains the state of a later job. `resume`
    is the shell command that the job has left because no other job resumes the run; empty without one.
    `advice` is set if the job can never start, or if it has ended and the scheduler no longer knows it;
    `warning` if its ranks may have trained separately, or if its newest snapshot was not saved. `cost` is
    that of all jobs of the run; None if it was not recorded. `no_answer` is why the scheduler did not answer,
    so that only files are known.
    """

    job_id: str
    verdict: str
    job: JobState | None
    run_dir: str
    submission: ledger.SubmissionRecord | None
    state: RunState | None
    attempts: tuple[ledger.Attempt, ...]
    failed_nodes: tuple[FailedNode, ...]
    next_job: str
    resume: str
    logs: tuple[str, ...]
    progress: Progress | None
    log_age_s: float
    advice: str
    warning: str
    cost: RunCost | None
    post_mortem: PostMortem | None
    no_answer: str = ""


class UnknownJobError(RequestError):
    """Neither the scheduler nor a run directory knows the job: exit code 2."""


def report_known(job_id: str, job: JobState | None, run_dir: Path | None) -> JobReport:
    """Returns the current status of a job. `job` is its state in the scheduler; None if it is unknown there.

    Raises:
        UnknownJobError: neither the scheduler nor a run directory knows the job.
    """
    if job is not None and SLUID.fullmatch(job_id):
        job_id = job.job_id
    run_dir = run_dir or find_run_dir(job_id, job, Path.cwd())
    if job is None and run_dir is None:
        raise UnknownJobError(
            f"job {job_id} was not found by the scheduler or in a run directory in {Path.cwd()}; check the "
            "job ID, change to the directory from which it was submitted, or set --run-dir"
        )
    return combine(job_id, job, run_dir)


def combine(job_id: str, job: JobState | None, run_dir: Path | None) -> JobReport:
    """Returns the report on a job from its state in the scheduler, its run directory and its log."""
    submission = ledger.submission_of(run_dir, job_id) if run_dir else None
    if job is not None:
        paths = log_paths(job)
    else:
        # A job that was submitted without ddp-hpc has probably been submitted from this directory.
        work_dir = Path(submission.work_dir) if submission else Path.cwd()
        paths = usual_logs(work_dir, job_id) if run_dir else []
    log = read_tail(paths)
    starts = tuple(ledger.attempts(run_dir)) if run_dir else ()
    # The files in the run directory describe its last attempt.
    is_last = run_dir is not None and (not starts or same_job(starts[-1].job_id, job_id))
    start = starts[-1] if starts and is_last else None
    state: RunState | None = None
    if run_dir and is_last:
        begin_s = start.at_s if start else submission.at_s if submission else 0
        state = _state_since(run_dir, begin_s)
    job = _with_known_end(job, state, paths)
    is_running = job is not None and job.phase == "running"
    next_job = _next_job(run_dir, job_id, starts, is_over=job is not None and job.phase == "ended")
    resume = ledger.resume_command(run_dir) if run_dir and is_last and not next_job else ""
    evidence = Evidence(
        log=log,
        state=state,
        next_job=next_job,
        first_step=start.first_step if start else 0,
        recorded=read_end(run_dir, start.key.partition("@")[0]) if run_dir and start else None,
        has_command=bool(resume),
    )
    return JobReport(
        job_id=job.job_id if job else job_id,
        verdict=verdict_of(job, state),
        job=job,
        run_dir=str(run_dir) if run_dir else "",
        submission=submission,
        state=state,
        attempts=starts,
        failed_nodes=failed_nodes(run_dir) if run_dir else (),
        next_job=next_job,
        resume=resume,
        logs=tuple(map(str, paths)),
        progress=None if job and job.phase == "waiting" else progress_in(last_attempt(log)),
        log_age_s=age_s(paths, time.time()) if job and job.phase == "running" else 0.0,
        advice=_advice(job, evidence),
        warning=warning_in(read_head(paths) + log)
        or (not_saved_in(log, state.step if state else 0) if is_running else ""),
        cost=run_cost(run_dir, is_running=is_last and is_running) if run_dir else None,
        post_mortem=examine(job, evidence) if job else None,
    )


def _advice(job: JobState | None, evidence: Evidence) -> str:
    """Returns what to do, if this does not follow from a post-mortem."""
    if job is not None:
        return advice_while_waiting(job) if job.phase == "waiting" else ""
    state, recorded = evidence.state, evidence.recorded
    if evidence.next_job:
        return ""
    if recorded is not None:
        of_cause = "" if evidence.has_command and recorded.cause.may_resume else recorded.cause.advice
        return state.state.advice_with(of_cause) if state is not None and of_cause else of_cause
    # A program can write its state itself.
    if state is None or state.state not in State.ending_in("stop", "failure"):
        return ""
    return "" if state.state.is_resumed_by_job else state.state.how_to_resume()


def _with_known_end(job: JobState | None, state: RunState | None, logs: list[Path]) -> JobState | None:
    """Returns the job, with the end that its run and its log show if the scheduler has no record of it."""
    if job is None or job.end != "unknown":
        return job
    if state is not None and (state.state.is_complete or state.state.is_failure):
        return replace(job, end="done" if state.state.is_complete else "failed")
    # With -k doe, PBS creates the log at the start of the job.
    never_ran = state is None and job.log_is_live and logs and logs[0].parent.is_dir() and not is_there(logs)
    return replace(job, end="cancelled", reason="it has no log, so it never started") if never_ran else job


def _state_since(run_dir: Path, begin_s: int) -> RunState | None:
    """Returns the state if it was written since the job began. An older state belongs to an earlier run."""
    with suppress(DdpHpcError, OSError):
        if state_path(run_dir).stat().st_mtime >= begin_s:
            return read_state(run_dir)
    return None


def _next_job(run_dir: Path | None, job_id: str, starts: tuple[ledger.Attempt, ...], *, is_over: bool) -> str:
    """Returns the job that resumed or will resume the run after this job, except jobs that never started."""
    successor = ledger.next_job(run_dir, job_id) if run_dir else ""
    seen = {job_id}
    while (
        is_over
        and successor
        and successor not in seen
        and not any(same_job(successor, s.job_id) for s in starts)
    ):
        seen.add(successor)
        try:
            later = read_job(check_job_id(successor))
        except DdpHpcError:  # the successor may still be active
            return successor
        if later is None or later.end not in ("cancelled", "dropped"):
            return successor
        successor = ledger.next_job(run_dir, successor) if run_dir else ""
    return "" if successor in seen else successor


def check_run_dir(run_dir: Path | None) -> None:
    """Raises RequestError if `run_dir` is not a directory."""
    if run_dir is not None and not os.path.isdir(run_dir):  # noqa: PTH112 - is_dir raises PermissionError
        raise RequestError(
            f"--run-dir {run_dir} is not a readable directory; give the run directory of the job"
        )


def verdict_of(job: JobState | None, state: RunState | None) -> str:
    """Returns the verdict of `JobReport`, from the scheduler's state of the job and the state of its run."""
    final = state.state if state and state.state.is_final else ""
    if job is None:
        return final or "unknown"
    if job.phase != "ended":
        return job.phase
    if job.end in ("done", "cancelled"):
        return job.end
    if state is not None and (state.state.is_stopped or state.state.is_failure):
        return state.state
    if job.exit_code == EXIT_REQUEUE:
        return State.REQUEUE
    return "unknown" if job.end == "unknown" else "failed"


def verdict_without_record(job: JobState, run_dir: Path | None) -> str:
    """Returns the verdict on a job of which the scheduler has no record, without reading its log."""
    state = _state_since(run_dir, 0) if run_dir is not None else None
    return verdict_of(_with_known_end(job, state, log_paths(job)), state)


def live_successor(report: JobReport) -> JobState | None:
    """Returns the waiting or running job that resumes the run; None if no record names one.

    Raises:
        DdpHpcError: the scheduler does not answer.
    """
    job_id, seen = report.next_job, {report.job_id}
    while job_id and job_id not in seen:
        seen.add(job_id)
        job = read_job(check_job_id(job_id))
        if job is not None and job.phase != "ended":
            return job
        job_id = ledger.next_job(Path(report.run_dir), job_id) if report.run_dir else ""
    return None


def last_jobs(run_dir: Path | None = None) -> Iterator[JobReport]:
    """Reports on the last job of `run_dir`, or of each run in the current directory, the newest last.

    Without a scheduler on the PATH, the reports are based on the run directories; that on `run_dir` also if
    the scheduler does not answer.

    Raises:
        RequestError: `run_dir` does not exist.
        DdpHpcError: the scheduler does not answer, and `run_dir` is None.
    """
    check_run_dir(run_dir)
    run_dirs = [run_dir] if run_dir is not None else runs_in(Path.cwd())[-_MAX_RUNS:]
    for directory in run_dirs:
        if jobs := ledger.job_ids(directory):
            job_id, job, no_answer = jobs[-1], None, ""
            try:
                job_id, job = current_job(directory, jobs[-1])
            except DdpHpcError as error:
                # The run directory can be a copy from another machine, or be damaged.
                if run_dir is None and not isinstance(error, RequestError):
                    raise
                no_answer = str(error)
            yield replace(combine(job_id, job, directory), no_answer=no_answer)


def current_job(run_dir: Path, last: str) -> tuple[str, JobState | None]:
    """Returns the running job of the run, even if another one was submitted later; otherwise the last one."""
    started = [attempt.job_id for attempt in ledger.attempts(run_dir)[-1:] if attempt.job_id != last]
    for job_id in (*started, last):
        # Each task of an array has its own run directory, unless no task has started.
        job = next(iter(read_jobs(check_job_id(job_id))), None)
        if job is not None and job.phase == "running":
            return job_id, job
    return last, job
