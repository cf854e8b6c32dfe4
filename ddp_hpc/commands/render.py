"""The command `ddp-hpc render`, which writes a job script."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from ddp_hpc.base.errors import RequestError
from ddp_hpc.commands.job_options import (
    TAKES_A_COMMAND,
    JobCommand,
    all_job_options,
    given_options,
    request_of,
)


@click.command("render", cls=JobCommand, context_settings=TAKES_A_COMMAND)
@all_job_options()
@click.option(
    "--step",
    is_flag=True,
    help="Instead of a job script, write torchrun_script.sh, which runs once per node and starts torchrun.",
)
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Write the script to FILE instead of standard output.",
)
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def command(step: bool, output: Path | None, **options: Any) -> None:
    """Write a job script for PBS, Slurm or this machine.

    Each rank runs COMMAND, which is written after --. The default is python -m ddp_hpc.train.

    \b
    Examples:
      ddp-hpc render --nodes 2 --walltime 01:00:00 -o job.sh
      ddp-hpc render --profile polaris --nodes 2 --queue debug --account MYPROJECT -o job.pbs
      ddp-hpc render --profile perlmutter --launcher torchrun --nodes 4 -- python train.py --lr 0.1
      ddp-hpc render --profile local --ranks-per-node 2 | bash
      ddp-hpc render --job job.toml --setup 'module load cuda' --env NCCL_DEBUG=INFO
      ddp-hpc render --walltime 02:00:00 --max-attempts 5 -- python -m ddp_hpc.train --epochs 100
      ddp-hpc render --nodes 4 --min-nodes 3 -o job.sh
      ddp-hpc render --profile leonardo --qos boost_qos_dbg --account MYPROJECT -o job.sh
      ddp-hpc render --template mine.sh.j2 -o job.sh
      ddp-hpc render --step -o torchrun_script.sh
    """  # noqa: D301 - a true \b keeps click from rewrapping the lines
    from ddp_hpc.render import render_script as scripts
    from ddp_hpc.render.rejection_warnings import advice, choices_made, never_resumed

    if step:
        if given := given_options(options):
            raise RequestError(
                f"--step cannot be combined with {given[0]}, as the step script is the same for every job. "
                "Use --step alone or with -o."
            )
        text = scripts.render_step()
    else:
        job, site = request_of(options)
        text = scripts.render(job, site, Path.cwd())
        for line in choices_made(job, site):
            click.echo(line, err=True)
        for line in filter(None, [*advice(job, site), never_resumed(job, site, Path.cwd())]):
            click.echo(f"warning: {line}", err=True)
    if output is None or str(output) == "-":
        sys.stdout.buffer.write(scripts.script_bytes(text))
    else:
        scripts.write_script(text, output)
