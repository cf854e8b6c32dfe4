"""The option `--run-dir` of the commands that act on a submitted job."""

from __future__ import annotations

from pathlib import Path

import click

run_dir_option = click.option(
    "--run-dir",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Run directory of the job.  [default: detected]",
)
