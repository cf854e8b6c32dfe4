"""The option `--run-dir` of the commands that act on a submitted job."""

from __future__ import annotations

from pathlib import Path

import click

from ddp_hpc.base.errors import RequestError

run_dir_option = click.option(
    "--run-dir",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Run directory of the job.  [default: detected]",
)


def job_and_run_dir(job: str | None, run_dir: Path | None) -> tuple[str | None, Path | None]:
    """Returns the values of JOB and --run-dir; the run directory can be given in place of the job."""
    if job is None or run_dir is not None or job[:1].isdigit() or not Path(job).is_dir():
        return job, run_dir
    return None, Path(job)


def last_job_of(run_dir: Path | None) -> str:
    """Returns the ID of the last job of the run.

    Raises:
        RequestError: there is none, or `run_dir` is None.
    """
    from ddp_hpc.queue.submission_ledger import job_ids

    if run_dir is not None and (jobs := job_ids(run_dir)):
        return jobs[-1]
    missing = "neither JOB nor RUN_DIR was given" if run_dir is None else f"{run_dir} is not a run directory"
    raise RequestError(f"{missing}; give one of them, such as ddp-hpc logs 1234")
