"""The option `--run-dir` of the commands for a job that has been submitted."""

from __future__ import annotations

from pathlib import Path

import click

run_dir_option = click.option(
    "--run-dir",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Run directory of the job.  [default: detected]",
)
