"""The command `ddp-hpc status`, which shows the state of jobs."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ddp_hpc.base.errors import EXIT_DONE, EXIT_FAILED, RequestError
from ddp_hpc.base.run_outcomes import State
from ddp_hpc.commands.run_dir_option import job_and_run_dir, run_dir_option

if TYPE_CHECKING:
    from ddp_hpc.queue.array_report import ArrayReport
    from ddp_hpc.queue.job_report import JobReport


@click.command("status")
@click.option("--json", "as_json", is_flag=True, help="Print all information as one JSON object or list.")
@click.option("--long", "is_long", is_flag=True, help="Without JOB, print all lines about each job.")
@run_dir_option
@click.argument("job", metavar="[JOB|RUN_DIR]", required=False)
def command(job: str | None, as_json: bool, is_long: bool, run_dir: Path | None) -> None:
    """Show the state and progress of a job and, once it has ended, why it ended and what to do next.

    With RUN_DIR, the command shows the last job of this run; if the scheduler does not answer, it shows what
    the files of the run contain. Without JOB or RUN_DIR, it prints one line about the last job of each run in
    the directory runs/ of the current directory. With --long, it prints as much as with JOB.

    For a job array, it shows the number of tasks by state, and why tasks failed. Put an ID such as '12[3]' in
    quotes.

    The exit code is 0 if the job is pending, running or done, 75 if it stopped with its state saved and must
    be resumed, 1 if it failed or its state is unknown, and 2 if there is no such job.

    \b
    Examples:
      ddp-hpc status
      ddp-hpc status --long
      ddp-hpc status runs/ddp
      ddp-hpc status 1234
      ddp-hpc status 1234_2
      ddp-hpc status '12[3].pbs-srv'
      ddp-hpc status 12.pbs-srv --run-dir /scratch/me/runs/big
      ddp-hpc status 1234 --json
    """  # noqa: D301 - a true \b keeps click from rewrapping the lines
    from ddp_hpc.queue.array_report import report_job_or_array
    from ddp_hpc.queue.job_report import last_jobs

    is_one = job is not None
    job, run_dir = job_and_run_dir(job, run_dir)
    verdict, objects = "", []
    reports = last_jobs(run_dir) if job is None else [report_job_or_array(job, run_dir, is_file_enough=True)]
    for report in reports:
        if as_json:
            objects.append(_plain_numbers(asdict(report)))
        else:  # print each job at once, since the next one needs a slow query of the scheduler
            click.echo("\n" * bool(verdict and is_long) + "\n".join(_lines(report, is_long or is_one)))
        verdict = report.verdict
    if not verdict:
        raise RequestError(
            f"no JOB was given, and {run_dir or Path.cwd()} contains no run of ddp-hpc; give a JOB, or "
            "change to the directory that it was submitted from"
        )
    if as_json:
        click.echo(json.dumps(objects[0] if is_one else objects, indent=2))
    # With several jobs, this is the verdict on the last one.
    exit_codes = {"waiting": EXIT_DONE} | {state.value: state.exit_code for state in State}
    click.get_current_context().exit(exit_codes.get(verdict, EXIT_FAILED))


def _lines(report: JobReport | ArrayReport, is_long: bool) -> list[str]:
    from ddp_hpc.queue.job_report import JobReport
    from ddp_hpc.queue.status_text import line_of, lines_of, lines_of_array

    if not isinstance(report, JobReport):
        return [*lines_of_array(report)]
    return [*lines_of(report)] if is_long else [line_of(report, Path.cwd())]


def _plain_numbers(value: Any) -> Any:
    """Returns `value` with non-finite numbers replaced by None, as JSON has no NaN."""
    if isinstance(value, dict):
        return {key: _plain_numbers(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain_numbers(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
