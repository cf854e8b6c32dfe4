"""Runs a batch job: starts the launcher, again after failures, and has another job resume the run."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace

from ddp_hpc.base.errors import DdpHpcError, RequestError
from ddp_hpc.base.timeline import Moment, note
from ddp_hpc.launch.rank_environment import exported_names
from ddp_hpc.queue.failed_nodes import failed_nodes
from ddp_hpc.queue.run_conflicts import check_program
from ddp_hpc.queue.submission_ledger import Attempt
from ddp_hpc.schedulers.running_job import RunningJob, started_s
from ddp_hpc.schedulers.scheduler import Scheduler
from ddp_hpc.supervisor import decisions
from ddp_hpc.supervisor.attempts_in_job import run_attempts
from ddp_hpc.supervisor.check_nodes import check_nodes
from ddp_hpc.supervisor.job_clock import JobClock
from ddp_hpc.supervisor.job_log import complain, say
from ddp_hpc.supervisor.launch import Launch
from ddp_hpc.supervisor.next_job import NextJob
from ddp_hpc.supervisor.run_files import RunFiles
from ddp_hpc.supervisor.settings import Settings
from ddp_hpc.supervisor.settle import why_stopped

AFTER = "DDP_HPC_AFTER"
"""The job whose run this job resumes, if the scheduler does not start this job after its end."""
_AFTER_LIMIT_S, _LOST_LIMIT_S, _POLL_S = 180.0, 360.0, 2.0


def supervise(argv: list[str], settings: Settings, environ: Mapping[str, str]) -> int:
    """Runs the launch line `argv`, and returns the exit code of the job.

    Raises:
        DdpHpcError: the job cannot start, or another job must not resume the run.
    """
    job = settings.scheduler.inside_job.running_job(environ)
    job.arguments = settings.arguments
    job.script = script = _read_script(settings)
    if "DDP_HPC_DEADLINE" not in exported_names(script):  # it may come from another job
        environ = {name: value for name, value in environ.items() if name != "DDP_HPC_DEADLINE"}
    clock = JobClock(job, settings.scheduler, settings.walltime_s, environ)
    launch = Launch(argv, settings, environ, job, clock, script)
    if settings.idle_timeout_s is not None and launch.writes_state:
        raise RequestError("--idle-timeout cannot be used with ddp_hpc.train; use its option --hang-timeout")
    if launch.run_dir is None or not settings.scheduler.has_queue:
        return launch.run({}, None).code
    _warn_about_walltime(settings, job, clock)
    _wait_for_earlier_job(settings.scheduler, environ)
    files = RunFiles(launch.run_dir)
    files.check()
    _check_program(files, script)
    last = files.last_attempt()
    _check_not_in_use(files, last, job, settings.scheduler)
    before = files.state()
    attempt = decisions.begin_attempt(job.job_id, before, last, environ, settings.max_attempts)
    if isinstance(attempt, decisions.NothingToDo):
        say(f"ddp-hpc: {attempt.message}")
        return attempt.code
    if attempt.number > 1:
        say(
            f"ddp-hpc: attempt {attempt.number} of at most {settings.max_attempts}"
            f"{decisions.at_step(attempt.first_step, ', from step ')}"
        )
    known = {each.node for each in failed_nodes(files.path)}
    why_not = check_nodes(launch, clock, files, settings)
    if (newest := files.last_attempt()) != last:  # another job has started in the meantime
        _check_not_in_use(files, newest, job, settings.scheduler)
    variables = job.variables_for_successor()
    files.keep_script(settings.script, settings.scheduler.reader.array_directive, variables)
    next_job = NextJob(job, clock, files, settings)
    is_stopped = clock.stopped_s is not None or signal.SIGTERM in signal.sigpending()
    if is_stopped or why_not:
        stop = why_stopped(attempt, clock, files) if is_stopped else ""
        is_new = not known.issuperset(each.node for each in failed_nodes(files.path))
        return next_job.conclude_unstarted(attempt, why_not, stop, is_new=is_new)
    files.begin(attempt)
    with _on_timeline(attempt, files, settings.scheduler, environ):
        ended = run_attempts(attempt, launch, clock, files, settings)
        return next_job.conclude(ended, replace(ended.attempt, first_step=attempt.first_step))


@contextmanager
def _on_timeline(
    attempt: Attempt, files: RunFiles, scheduler: Scheduler, environ: Mapping[str, str]
) -> Iterator[None]:
    """Records the start of this job, and its end after the body."""
    num_nodes = _num_nodes(scheduler, environ)
    note(files.path, attempt.key, Moment.JOB_BEGAN, at_s=started_s(), num_nodes=num_nodes)
    try:
        yield
    finally:
        note(files.path, attempt.key, Moment.JOB_ENDED)


def _num_nodes(scheduler: Scheduler, environ: Mapping[str, str]) -> int:
    """Returns the number of nodes of this job; 1 if the scheduler's variables do not contain it."""
    with suppress(RequestError):
        if allocation := scheduler.inside_job.find_allocation(environ):
            return allocation.num_nodes
    return 1


def _read_script(settings: Settings) -> str:
    try:
        return settings.script.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        if not settings.scheduler.has_queue:
            return ""
        raise RequestError(
            f"--script {settings.script} cannot be read ({error.strerror}); "
            'give the path of the script with --script "$0"'
        ) from None


def _check_program(files: RunFiles, script: str) -> None:
    with suppress(OSError):
        check_program(
            files.path,
            files.script.read_text(encoding="utf-8", errors="replace"),
            script,
            "set DDP_HPC_RUN_DIR in the script to another directory (ddp-hpc render --name or --run-dir)",
        )


def _check_not_in_use(files: RunFiles, last: Attempt | None, job: RunningJob, scheduler: Scheduler) -> None:
    """Waits until the job of the last attempt is not running any more: its files must not be changed.

    Slurm shows a job whose only node is lost as running until SlurmdTimeout (300 s by default), and PBS until
    node_fail_requeue (310 s).

    Raises:
        RequestError: it is running.
    """
    if last is None or last.job_id == job.job_id or files.end(last) is not None:
        return
    before = files.state()

    def is_used() -> bool:
        """Returns whether the job seems to be running, which a change of the state proves."""
        if _phase(last.job_id, scheduler) != "running":
            return False
        if files.state() != before:
            raise in_use
        return True

    in_use = RequestError(
        f"the run directory {files.path} is in use by job {last.job_id}, which is running; submit "
        "this job again when that one has ended, or choose another --run-dir"
    )
    _wait_while(
        is_used,
        _LOST_LIMIT_S,
        f"ddp-hpc: the scheduler shows job {last.job_id}, which uses the run directory, as running; "
        f"waiting at most {_LOST_LIMIT_S:.0f} s in case its node is lost",
        in_use,
    )


def _wait_while(condition: Callable[[], bool], limit_s: float, notice: str, error: DdpHpcError) -> None:
    """Waits while a condition is true, and says so once; raises `error` if it is true after `limit_s`."""
    end_s, was_said = time.monotonic() + limit_s, False
    while condition():
        if time.monotonic() > end_s:
            raise error
        if not was_said:
            was_said = True
            say(notice)
        time.sleep(_POLL_S)


def _phase(job_id: str, scheduler: Scheduler) -> str:
    """Returns the phase of a job; "unknown" if the scheduler does not answer."""
    try:
        job = scheduler.commands.job_commands().read_job(job_id)
    except DdpHpcError:  # the server is busy, for example
        return "unknown"
    return "ended" if job is None else job.phase


def _warn_about_walltime(settings: Settings, job: RunningJob, clock: JobClock) -> None:
    scheduler = settings.scheduler
    if (
        scheduler.inside_job.can_requeue
        and job.is_job
        and not clock.is_reported
        and settings.walltime_s is not None
    ):
        complain(
            f"{scheduler.title} does not report the walltime of job {job.job_id}; "
            f"assuming the {settings.walltime_s:.0f} s of the directives in the script",
            kind="warning",
        )


def _wait_for_earlier_job(scheduler: Scheduler, environ: Mapping[str, str]) -> None:
    """Waits for the job that has submitted this one; only needed if qsub accepts no dependency on it.

    Raises:
        DdpHpcError: that job has not ended in time.
    """
    if earlier := environ.get(AFTER, ""):
        _wait_while(
            lambda: _phase(earlier, scheduler) != "ended",
            _AFTER_LIMIT_S,
            f"ddp-hpc: waiting until job {earlier}, whose run this job resumes, has ended",
            DdpHpcError(
                f"job {earlier}, whose run this job resumes, has not ended within {_AFTER_LIMIT_S:.0f} s; "
                "when it has ended, submit the script again"
            ),
        )
