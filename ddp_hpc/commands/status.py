"""`ddp-hpc status`."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from ddp_hpc.errors import EXIT_AGAIN, EXIT_DONE, EXIT_FAILED, RequestError

# The exit code of each verdict; of several jobs the last one's counts.
_EXIT_CODES = {"waiting": EXIT_DONE, "running": EXIT_DONE, "done": EXIT_DONE, "requeue": EXIT_AGAIN}


@click.command("status")
@click.option("--json", "as_json", is_flag=True, help="Print all that is known as one JSON object or list.")
@click.option(
    "--run-dir", type=click.Path(path_type=Path), metavar="DIR", help="Its run folder.  [it is found]"
)
@click.argument("job", required=False)
def command(job: str | None, as_json: bool, run_dir: Path | None) -> None:
    """Tell how a job is: in the queue, training, or why it ended and what to do.

    Without JOB: the last job of each run in the current folder's runs/, or of --run-dir.

    Ends with 0 where the job waits, runs or is done, with 75 where it stopped with its state saved and is
    to be run again, with 1 where it failed or nobody can say, with 2 where there is no such job.

    \b
    Examples:
      ddp-hpc status
      ddp-hpc status 1234
      ddp-hpc status 12.pbs-srv --run-dir /scratch/me/runs/big
      ddp-hpc status 1234 --json
    """  # noqa: D301 - a true \b tells click to leave the lines alone
    from ddp_hpc.jobs.job_report import last_jobs, report_job
    from ddp_hpc.jobs.status_text import lines_of

    verdict, found = "", []
    for one in [report_job(job, run_dir)] if job is not None else last_jobs(run_dir):
        if as_json:
            found.append(_plain_numbers(asdict(one)))
        else:  # at once: each is a question to the scheduler, which takes its time
            click.echo(("\n" if verdict else "") + "\n".join(lines_of(one)))
        verdict = one.verdict
    if not verdict:
        raise RequestError(
            f"no job was named, and {run_dir or Path.cwd()} has no run of ddp-hpc; name a JOB, or go to "
            "the folder that it was submitted from"
        )
    if as_json:
        click.echo(json.dumps(found if job is None else found[0], indent=2))
    click.get_current_context().exit(_EXIT_CODES.get(verdict, EXIT_FAILED))


def _plain_numbers(value: Any) -> Any:
    """`value` for JSON, which has no NaN: a loss that is none becomes null."""
    if isinstance(value, dict):
        return {key: _plain_numbers(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain_numbers(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
