"""The command `ddp-hpc cancel`, which cancels jobs."""

from __future__ import annotations

import shlex
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ddp_hpc.base.errors import DdpHpcError
from ddp_hpc.commands.run_dir_option import run_dir_option

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddp_hpc.queue.array_report import ArrayReport
    from ddp_hpc.queue.job_report import JobReport
    from ddp_hpc.schedulers.job_state import JobState


@click.command("cancel")
@run_dir_option
@click.argument("job")
def command(job: str, run_dir: Path | None) -> None:
    """Cancel a job or a job array.

    Prints the ID of the cancelled job. When a job whose script was written by ddp-hpc is cancelled, it saves
    its state and does not submit another job. If the job has already ended, the command cancels nothing,
    reports which job continues the run, and exits with code 0.

    \b
    Examples:
      ddp-hpc cancel 1234
      ddp-hpc cancel 1234.pbs-srv
    """  # noqa: D301 - a true \b keeps click from rewrapping the lines
    from ddp_hpc.queue.array_report import ArrayReport, report_job_or_array

    seen = report_job_or_array(job, run_dir)
    if isinstance(seen, ArrayReport):
        _cancel_array(seen, run_dir)
        return
    if seen.job is None or seen.job.phase == "ended":
        click.echo(_ended(seen.job_id, seen.job), err=True)
    elif refusal := _record_and_cancel(seen.job, seen.run_dir):
        raise DdpHpcError(refusal)
    _name_successor(seen)


def _cancel_array(array: ArrayReport, run_dir: Path | None) -> None:
    """Cancels all tasks of a job array that have not ended, with one request.

    Raises:
        DdpHpcError: the scheduler refuses to cancel them.
    """
    from ddp_hpc.queue.array_report import run_dir_of_task

    tasks = array.live_tasks
    if not tasks:
        counts = ", ".join(f"{number} {verdict}" for verdict, number in array.counts.items())
        click.echo(f"all tasks of job {array.job_id} have already ended ({counts})", err=True)
    else:
        recorded = {task.job_id: own for task in tasks if (own := run_dir_of_task(task, run_dir))}
        for job_id, own in recorded.items():
            _record(job_id, own)
        if refusal := _cancel(replace(tasks[0], job_id=array.job_id), [task.job_id for task in tasks]):
            _forget(recorded)
            raise DdpHpcError(refusal)
    for task_report in array.problems:
        _name_successor(task_report)


def _record(job_id: str, run_dir: Path) -> None:
    from ddp_hpc.queue.submission_ledger import record_cancelled

    try:
        record_cancelled(run_dir, job_id)
    except DdpHpcError as error:
        click.echo(f"warning: {error}; check whether the job submits a successor", err=True)


def _forget(recorded: dict[str, Path]) -> None:
    from ddp_hpc.queue.submission_ledger import forget_cancelled

    for job_id, run_dir in recorded.items():
        forget_cancelled(run_dir, job_id)


def _record_and_cancel(job: JobState, run_dir: str) -> str:
    """Cancels a job and records that in its run directory; returns an error message, empty on success.

    Without this record, the job script would submit a successor, because it receives the same signal at the
    end of the walltime.
    """
    if not run_dir:
        return _cancel(job)
    _record(job.job_id, Path(run_dir))
    if refusal := _cancel(job):
        _forget({job.job_id: Path(run_dir)})
    return refusal


def _name_successor(seen: JobReport) -> None:
    """Prints which job continues the run.

    This job is not cancelled, as it could belong to another run that used the same directory.
    """
    from ddp_hpc.queue.job_report import live_successor

    try:
        if later := live_successor(seen):
            to_cancel = f"to cancel it: ddp-hpc cancel {shlex.quote(later.job_id)}"
            click.echo(f"the run continues in job {later.job_id}; {to_cancel}", err=True)
    except DdpHpcError as error:
        click.echo(f"warning: {error}", err=True)


def _cancel(job: JobState, tasks: Sequence[str] = ()) -> str:
    """Cancels a job, or these tasks of a job array, and prints its ID; returns an error message, empty if the
    job has meanwhile ended.
    """
    from ddp_hpc.schedulers.client import read_jobs
    from ddp_hpc.schedulers.registry import SCHEDULERS

    named = f"job {job.job_id} of {job.owner}"
    try:
        refused = SCHEDULERS[job.scheduler].commands.job_commands().cancel(job.job_id, tasks)
    except DdpHpcError as error:
        return f"{error} ({named})"
    if not refused:
        click.echo(job.job_id)
        return ""
    with suppress(DdpHpcError):
        jobs_now = read_jobs(job.job_id)
        if all(job_now.phase == "ended" for job_now in jobs_now):
            click.echo(_ended(job.job_id, jobs_now[0] if jobs_now else None), err=True)
            return ""
    return f"{refused} ({named} was not cancelled); only its owner or the site can cancel it"


def _ended(job_id: str, job: JobState | None) -> str:
    return f"job {job_id} has already ended" + (f" ({job.word})" if job else "")
