"""The command `ddp-hpc logs`, which prints the log of a job."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from ddp_hpc.commands.run_dir_option import run_dir_option


@click.command("logs")
@click.option(
    "-f",
    "--follow",
    is_flag=True,
    help="Keep printing new output until the run has ended, including the output after a requeue and that of "
    "successor jobs.",
)
@run_dir_option
@click.argument("job")
def command(job: str, follow: bool, run_dir: Path | None) -> None:
    """Print the log of a job, or of one task of a job array.

    With --follow, the command waits if the job has not started yet. Ctrl-C stops this command, but not the
    job. The log file is read once per second; the scheduler is queried every few seconds at first, and later
    twice per minute.

    \b
    Examples:
      ddp-hpc logs 1234
      ddp-hpc logs 1234 --follow
      ddp-hpc logs 12.pbs-srv | grep error
    """  # noqa: D301 - a true \b keeps click from rewrapping the lines
    from ddp_hpc.queue import follow_log as log

    def write(chunk: bytes) -> None:
        sys.stdout.buffer.write(chunk)
        sys.stdout.buffer.flush()

    def say(line: str) -> None:
        click.echo(line, err=True)

    if follow:
        log.follow(job, run_dir, write, say)
    else:
        log.show(job, run_dir, write)
