"""`ddp-hpc cancel`."""

from __future__ import annotations

from pathlib import Path

import click

from ddp_hpc.errors import DdpHpcError


@click.command("cancel")
@click.option(
    "--only", is_flag=True, help="Leave the jobs that are queued after it: the run goes on with the next one."
)
@click.option(
    "--run-dir", type=click.Path(path_type=Path), metavar="DIR", help="Its run folder.  [it is found]"
)
@click.argument("job")
def command(job: str, only: bool, run_dir: Path | None) -> None:
    """Cancel a job and those that are queued to go on after it.

    Prints the ids of the jobs that are cancelled, the last one first. A job script of ddp-hpc saves
    its state when it is cancelled and submits no successor. A job that has ended already is no error.

    \b
    Examples:
      ddp-hpc cancel 1234
      ddp-hpc cancel 1234.pbs-srv --only
    """  # noqa: D301 - a true \b tells click to leave the lines alone
    from ddp_hpc.queue.scheduler import SCHEDULERS
    from ddp_hpc.queue.view import chain_after, look

    seen = look(job, run_dir)
    jobs = [] if only else chain_after(seen)
    if seen.job is not None and seen.job.phase != "ended":
        jobs.insert(0, seen.job)
    else:
        word = f" ({seen.job.word})" if seen.job else ""
        click.echo(f"job {seen.job_id} has already ended{word}", err=True)
    # The last one first: else the next would start when the one before it is gone.
    for one in reversed(jobs):
        if refused := SCHEDULERS[one.scheduler].cancel(one.job_id):
            raise DdpHpcError(
                f"{refused} (job {one.job_id} of {one.owner} is left as it was); only its owner or the site "
                "can cancel it"
            )
        click.echo(one.job_id)
