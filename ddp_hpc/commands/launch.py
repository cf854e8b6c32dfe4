"""The command `ddp-hpc launch`, which starts ranks in the current allocation or on this machine."""

from __future__ import annotations

import os
import sys
from typing import Any

import click

from ddp_hpc.base.errors import RequestError
from ddp_hpc.commands.job_options import TAKES_A_COMMAND, job_options


@click.command("launch", context_settings=TAKES_A_COMMAND)
@click.option(
    "-n", "num_ranks", type=int, metavar="N", help="Total number of ranks.  [default: nodes x ranks per node]"
)
@job_options("profile", "ranks_per_node", "launcher", "mpi", "env", "env_style", "fallback")
@click.option("--dry-run", is_flag=True, help="Print the launch command without running it.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def command(
    num_ranks: int | None,
    dry_run: bool,
    command: tuple[str, ...],
    **options: Any,
) -> None:
    """Start COMMAND on the nodes of the current allocation, or on this machine.

    As in a rendered job script, the site's profile determines the launcher, its CPU binding and the
    environment variables. Without GPUs, the default number of ranks per node is the number of tasks that the
    job requested, or depends on the number of cores. Load the modules that COMMAND needs before you run this
    command. The exit code is that of the launcher. Ctrl-C ends the ranks, with SIGTERM and after 10 s with
    SIGKILL; the exit code is then 130. The launcher gets SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2.

    \b
    Examples:
      ddp-hpc launch -n 8 python -m ddp_hpc.train --epochs 1
      ddp-hpc launch --dry-run -- python train.py --lr 0.1
      ddp-hpc launch --ranks-per-node 2 --env NCCL_DEBUG=INFO -- python train.py
      ddp-hpc launch --launcher torchrun -- python train.py
      ddp-hpc launch --profile local -n 2 -- ./my_program
    """  # noqa: D301 - a true \b keeps click from rewrapping the lines
    if not command:
        raise RequestError("no command given. Example: ddp-hpc launch -n 8 -- python -m ddp_hpc.train")
    from ddp_hpc.launch.launch_here import plan
    from ddp_hpc.launch.run_launcher import run_launcher
    from ddp_hpc.request.job import Job

    job = Job.of(**options, command=command)
    launch = plan(job, job.profile, num_ranks, os.environ)
    click.echo(launch.why, err=True)
    if dry_run:
        sys.stdout.buffer.write(os.fsencode(launch.line()) + b"\n")
        return
    click.echo(launch.about, err=True)
    click.get_current_context().exit(run_launcher(launch.argv, launch.environ(os.environ)))
