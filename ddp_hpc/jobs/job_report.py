"""All that can be told of one job: the scheduler's word, its run folder, its log, and why it ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ddp_hpc.errors import EXIT_REQUEUE, DdpHpcError, RequestError
from ddp_hpc.jobs import submission_ledger as ledger
from ddp_hpc.jobs.first_failure import this_attempt
from ddp_hpc.jobs.log_files import age_s, log_paths, read_tail, successor_in, usual_logs
from ddp_hpc.jobs.post_mortem import PostMortem, advice_while_waiting, examine
from ddp_hpc.jobs.training_progress import Progress, read_progress
from ddp_hpc.run_directory import RunState, read_state
from ddp_hpc.schedulers.client import read_job
from ddp_hpc.schedulers.job_state import JobState, check_job_id, same_job

# Each is a question to the scheduler.
_MAX_RUNS = 20


@dataclass(frozen=True, kw_only=True)
class View:
    """One job. `verdict`: waiting, running, done, again (state saved, to be run again), cancelled, failed, or
    unknown.

    `job` is None where the scheduler knows it no longer, `state` where the folder tells of a
    later job by now. `advice` is for a job that waits for what will not come.
    """

    job_id: str
    verdict: str
    job: JobState | None
    run_dir: str
    submission: ledger.Submission | None
    state: RunState | None
    attempts: tuple[ledger.Attempt, ...]
    next_job: str
    logs: tuple[str, ...]
    progress: Progress | None
    log_age_s: float
    advice: str
    post_mortem: PostMortem | None


class UnknownJobError(RequestError):
    """Neither the scheduler nor a run folder knows the job: exit code 2."""


def look(job_id: str, run_dir: Path | None = None) -> View:
    """The job as it is now.

    Raises:
        UnknownJobError: neither the scheduler nor a run folder knows the job.
        RequestError: no such id or folder.
        DdpHpcError: the scheduler does not answer.
    """
    _check_run_dir(run_dir)
    job = read_job(check_job_id(job_id))
    folder = run_dir or ledger.find_run_dir(job_id, job, Path.cwd())
    if job is None and folder is None:
        raise UnknownJobError(
            f"job {job_id} is known neither to the scheduler nor to a run folder in {Path.cwd()}; check the "
            "number, or go to the folder it was submitted from, or name its --run-dir"
        )
    return view(job_id, job, folder)


def view(job_id: str, job: JobState | None, folder: Path | None) -> View:
    """What the scheduler's word, the folder and the log say together."""
    sent = ledger.submission_of(folder, job_id) if folder else None
    forgotten = usual_logs(Path(sent.work_dir), job_id) if job is None and sent else []
    paths = log_paths(job) if job is not None else forgotten
    log = read_tail(paths)
    starts = tuple(ledger.attempts(folder)) if folder else ()
    # The folder's word is that of its last attempt.
    is_last = not starts or same_job(starts[-1].job_id, job_id)
    state = _state(folder) if folder and is_last else None
    next_job = _next_job(folder, job_id, log, starts, is_over=job is not None and job.phase == "ended")
    running = job is not None and job.phase == "running"
    return View(
        job_id=job.job_id if job else job_id,
        verdict=_verdict(job, state),
        job=job,
        run_dir=str(folder) if folder else "",
        submission=sent,
        state=state,
        attempts=starts,
        next_job=next_job,
        logs=tuple(map(str, paths)),
        progress=_progress(job, folder if is_last else None, log, starts),
        log_age_s=age_s(paths, time.time()) if running else 0.0,
        advice=advice_while_waiting(job) if job and job.phase == "waiting" else "",
        post_mortem=examine(job, state, log, next_job) if job else None,
    )


def _progress(
    job: JobState | None, folder: Path | None, log: str, starts: tuple[ledger.Attempt, ...]
) -> Progress | None:
    """Of this attempt alone: a log is added to by the next one, and a file of metrics is the run's.

    `folder` is None where its files tell of a later job by now.
    """
    if job is not None and job.phase == "waiting":
        return None
    start = starts[-1] if folder is not None and starts else None
    return read_progress(
        this_attempt(log),
        folder,
        job.work_dir if job else "",
        after_step=start.first_step if start else 0,
        since_s=start.at_s if start else 0,
    )


def _next_job(
    folder: Path | None, job_id: str, log: str, starts: tuple[ledger.Attempt, ...], *, is_over: bool
) -> str:
    """The job that goes on after this one, or did; of one that has ended without a start the next one."""
    found = (ledger.next_job(folder, job_id) if folder else "") or successor_in(log, job_id)
    asked = {job_id}
    while is_over and found and found not in asked and not any(same_job(found, s.job_id) for s in starts):
        asked.add(found)
        try:
            later = read_job(check_job_id(found))
        except DdpHpcError:  # not known to be over
            return found
        if later is None or later.end not in ("cancelled", "dropped"):
            return found
        found = ledger.next_job(folder, found) if folder else ""
    return "" if found in asked else found


def _check_run_dir(run_dir: Path | None) -> None:
    try:
        is_there = run_dir is None or run_dir.is_dir()
    except OSError:
        is_there = False
    if not is_there:
        raise RequestError(f"--run-dir {run_dir} is no folder that can be read; name the run's folder")


def _state(folder: Path) -> RunState | None:
    try:
        return read_state(folder)
    except DdpHpcError:
        return None


def _verdict(job: JobState | None, state: RunState | None) -> str:
    said = state.state if state else ""
    if job is None:
        return said if said in ("done", "again", "failed") else "unknown"
    if job.phase != "ended":
        return job.phase
    if job.end == "done":
        return "done"
    if job.exit_code == EXIT_REQUEUE or said == "again":
        return "again"
    return "cancelled" if job.end == "cancelled" else "failed"


def chain_after(seen: View) -> list[JobState]:
    """The jobs that were queued as a chain after this one and have not ended, in their order.

    Raises:
        DdpHpcError: the scheduler does not answer.
    """
    if not seen.run_dir:
        return []
    first = ledger.chained_job(Path(seen.run_dir), seen.job_id)
    return list(_live(seen, first, ledger.chained_job))


def goes_on_as(seen: View) -> JobState | None:
    """The job that waits or runs to go on with this one's run, as far as its log and its starts tell.

    Raises:
        DdpHpcError: the scheduler does not answer.
    """
    return next(_live(seen, seen.next_job, ledger.next_job), None)


def _live(seen: View, job_id: str, following: Callable[[Path, str], str]) -> Iterator[JobState]:
    asked = {seen.job_id}
    while job_id and job_id not in asked:
        asked.add(job_id)
        job = read_job(check_job_id(job_id))
        if job is not None and job.phase != "ended":
            yield job
        job_id = following(Path(seen.run_dir), job_id) if seen.run_dir else ""


def last_jobs(run_dir: Path | None = None) -> Iterator[View]:
    """The last job of each run in the current folder, the newest run last; or of `run_dir` alone.

    Where neither scheduler is on the PATH, what the run folders say.

    Raises:
        RequestError: no such folder.
        DdpHpcError: the scheduler does not answer.
    """
    _check_run_dir(run_dir)
    folders = [run_dir] if run_dir is not None else ledger.runs_in(Path.cwd())[-_MAX_RUNS:]
    for folder in folders:
        if jobs := ledger.job_ids(folder):
            try:
                job = read_job(check_job_id(jobs[-1]))
            except RequestError:  # a run folder that was copied here; or damage in it
                job = None
            yield view(jobs[-1], job, folder)
