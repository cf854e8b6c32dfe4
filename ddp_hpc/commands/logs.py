"""`ddp-hpc logs`."""

from __future__ import annotations

import sys
from pathlib import Path

import click


@click.command("logs")
@click.option(
    "-f",
    "--follow",
    is_flag=True,
    help="Go on until the run is over: through requeues and the jobs that go on after this one.",
)
@click.option(
    "--run-dir", type=click.Path(path_type=Path), metavar="DIR", help="Its run folder.  [it is found]"
)
@click.argument("job")
def command(job: str, follow: bool, run_dir: Path | None) -> None:
    """Print the log of a job.

    With --follow a job that has not started is waited for; Ctrl-C ends the printing and not the job.
    Its file is looked at once a second, the scheduler is asked every few seconds, later twice a minute.

    \b
    Examples:
      ddp-hpc logs 1234
      ddp-hpc logs 1234 --follow
      ddp-hpc logs 12.pbs-srv | grep error
    """  # noqa: D301 - a true \b tells click to leave the lines alone
    from ddp_hpc.jobs import follow_log as log

    def write(piece: bytes) -> None:
        sys.stdout.buffer.write(piece)
        sys.stdout.buffer.flush()

    def say(line: str) -> None:
        click.echo(line, err=True)

    if follow:
        log.follow(job, run_dir, write, say)
    else:
        log.show(job, run_dir, write)
