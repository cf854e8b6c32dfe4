"""The command `ddp-hpc logs`, which prints the log of a job."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from ddp_hpc.base.errors import RequestError
from ddp_hpc.commands.run_dir_option import job_and_run_dir, last_job_of, run_dir_option


@click.command("logs")
@click.option(
    "-f",
    "--follow",
    is_flag=True,
    help="Keep printing new output until the run has ended, including the output after a requeue and that of "
    "successor jobs.",
)
@click.option(
    "--rank",
    type=click.IntRange(min=0),
    metavar="R",
    help="Print the output of this rank, if the job has --rank-logs.",
)
@click.option(
    "--attempt",
    type=click.IntRange(min=1),
    metavar="A",
    help="With --rank, print only the output in this attempt.",
    show_default="all attempts of the job",
)
@run_dir_option
@click.argument("job", metavar="JOB|RUN_DIR", required=False)
def command(
    job: str | None, follow: bool, rank: int | None, attempt: int | None, run_dir: Path | None
) -> None:
    """Print the log of a job, of one task of a job array, or of the last job of a run directory.

    With --follow, the command waits if the job has not started yet. Ctrl-C stops this command, but not the
    job. The log file is read once per second; the scheduler is queried every few seconds at first, and later
    twice per minute.

    \b
    Examples:
      ddp-hpc logs 1234
      ddp-hpc logs 1234 --follow
      ddp-hpc logs 12.pbs-srv | grep error
      ddp-hpc logs 1234 --rank 3 --attempt 2
      ddp-hpc logs runs/ddp
    """  # noqa: D301 - a true \b keeps click from rewrapping the lines
    from ddp_hpc.queue import follow_log as log

    def write(chunk: bytes) -> None:
        sys.stdout.buffer.write(chunk)
        sys.stdout.buffer.flush()

    def say(line: str) -> None:
        click.echo(line, err=True)

    if attempt is not None and rank is None:
        raise RequestError(f"--attempt {attempt} was given without --rank; add --rank, or omit --attempt")
    job, run_dir = job_and_run_dir(job, run_dir)
    job = job or last_job_of(run_dir)
    source = log.Source(run_dir, rank, attempt)
    if follow:
        log.follow(job, source, write, say)
    else:
        log.show(job, source, write, say)
