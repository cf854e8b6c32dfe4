"""The command `ddp-hpc cancel`, which cancels jobs."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ddp_hpc.commands.completion import complete_jobs
from ddp_hpc.commands.run_dir_option import run_dir_option
from ddp_hpc.errors import DdpHpcError

if TYPE_CHECKING:
    from ddp_hpc.jobs.job_report import JobReport
    from ddp_hpc.schedulers.job_state import JobState


@click.command("cancel")
@click.option(
    "--only", is_flag=True, help="Cancel only this job, so that the next job of the chain resumes the run."
)
@run_dir_option
@click.argument("job", shell_complete=complete_jobs)
def command(job: str, only: bool, run_dir: Path | None) -> None:
    """Cancel a job and, if it is part of a chain, the jobs that were queued to run after it.

    Prints the IDs of the cancelled jobs, the last job of the chain first. When a job whose script was written
    by ddp-hpc is cancelled, it saves its state and does not submit another job. If the job has already ended,
    the command cancels nothing, reports which job continues the run, and exits with code 0.

    \b
    Examples:
      ddp-hpc cancel 1234
      ddp-hpc cancel 1234.pbs-srv --only
    """  # noqa: D301 - a true \b keeps click from rewrapping the lines
    from ddp_hpc.jobs.job_report import report_job, rest_of_chain

    seen = report_job(job, run_dir)
    jobs: list[JobState] = []
    if seen.job is None or seen.job.phase == "ended":
        click.echo(_ended(seen.job_id, seen.job), err=True)
    else:
        jobs = [seen.job, *([] if only else rest_of_chain(seen))]
    # The last job is cancelled first, because the next job in the chain starts as soon as the previous one is
    # cancelled.
    refusals = [refusal for one in reversed(jobs) if (refusal := _record_and_cancel(one, seen.run_dir))]
    if not only:
        _name_successor(seen, jobs)
    for one in refusals[:-1]:
        click.echo(f"error: {one}", err=True)
    if refusals:
        raise DdpHpcError(refusals[-1])


def _record_and_cancel(job: JobState, run_dir: str) -> str:
    """Cancels a job and records that in its run directory; returns an error message, empty on success.

    Without this record, the job script would submit a successor, because it receives the same signal at the
    end of the walltime.
    """
    from ddp_hpc.jobs.submission_ledger import forget_cancelled, record_cancelled

    if not run_dir:
        return _cancel(job)
    try:
        record_cancelled(Path(run_dir), job.job_id)
    except DdpHpcError as error:
        click.echo(f"warning: {error}; check whether the job submits a successor", err=True)
    if refusal := _cancel(job):
        forget_cancelled(Path(run_dir), job.job_id)
    return refusal


def _name_successor(seen: JobReport, cancelled: list[JobState]) -> None:
    """Prints which job continues the run.

    This job is not cancelled, as it could belong to another run that used the same directory.
    """
    from ddp_hpc.jobs.job_report import live_successor
    from ddp_hpc.schedulers.job_state import same_job

    if any(same_job(seen.next_job, one.job_id) for one in cancelled):
        return
    try:
        if later := live_successor(seen):
            to_cancel = f"to cancel it: ddp-hpc cancel {later.job_id}"
            click.echo(f"the run continues in job {later.job_id}; {to_cancel}", err=True)
    except DdpHpcError as error:
        click.echo(f"warning: {error}", err=True)


def _cancel(job: JobState) -> str:
    """Cancels a job and prints its ID; returns an error message, empty if the job has meanwhile ended."""
    from ddp_hpc.schedulers.client import read_job
    from ddp_hpc.schedulers.registry import SCHEDULERS

    named = f"job {job.job_id} of {job.owner}"
    try:
        refused = SCHEDULERS[job.scheduler].job_commands().cancel(job.job_id)
    except DdpHpcError as error:
        return f"{error} ({named})"
    if not refused:
        click.echo(job.job_id)
        return ""
    with suppress(DdpHpcError):
        now = read_job(job.job_id)
        if now is None or now.phase == "ended":
            click.echo(_ended(job.job_id, now), err=True)
            return ""
    return f"{refused} ({named} was not cancelled); only its owner or the site can cancel it"


def _ended(job_id: str, job: JobState | None) -> str:
    return f"job {job_id} has already ended" + (f" ({job.word})" if job else "")
