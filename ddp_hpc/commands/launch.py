"""The command `ddp-hpc launch`, which starts ranks in the current allocation or on this machine."""

from __future__ import annotations

import os
import sys
from typing import Any

import click

from ddp_hpc.base.errors import RequestError
from ddp_hpc.commands.completion import complete_profiles
from ddp_hpc.commands.job_options import TAKES_A_COMMAND, name_and_value


@click.command("launch", context_settings=TAKES_A_COMMAND)
@click.option(
    "-n", "num_ranks", type=int, metavar="N", help="Total number of ranks.  [default: nodes x ranks per node]"
)
@click.option(
    "--ranks-per-node",
    type=int,
    metavar="R",
    help="Number of ranks per node.  [default: one per GPU; without GPUs, the number of tasks that the job "
    "requested, or a number that depends on the number of cores]",
)
@click.option(
    "--profile",
    shell_complete=complete_profiles,
    metavar="NAME",
    help="Site profile; `ddp-hpc profiles list` lists the names.  [default: detected]",
)
@click.option(
    "--launcher",
    metavar="mpiexec|srun|torchrun",
    help="Launcher that starts the ranks.  [default: from the profile]",
)
@click.option(
    "--mpi",
    metavar="none|pmi2|pmix|cray_shasta",
    help="MPI plugin for srun (srun --mpi).  [default: from the site's Slurm configuration]",
)
@click.option(
    "--env",
    multiple=True,
    metavar="NAME=VALUE",
    help="Environment variable to set for the ranks; may be repeated.",
)
@click.option(
    "--fallback",
    metavar="NAME",
    help="Name of a set of alternative settings in the profile, for jobs that hang.",
)
@click.option(
    "--env-style",
    metavar="torchrun|none",
    help="Environment variables to set for Python programs other than ddp_hpc.train: those of torchrun, such "
    "as RANK, or none.  [default: torchrun]",
)
@click.option("--dry-run", is_flag=True, help="Print the launch command without running it.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def command(
    num_ranks: int | None,
    profile: str | None,
    env: tuple[str, ...],
    dry_run: bool,
    command: tuple[str, ...],
    **options: Any,
) -> None:
    """Start COMMAND on the nodes of the current allocation, or on this machine.

    As in a rendered job script, the site's profile determines the launcher, its CPU binding and the
    environment variables. Load the modules that COMMAND needs before you run this command. The exit code
    is that of the launcher. Ctrl-C ends the ranks, with SIGTERM and after 10 s with SIGKILL; the exit code is
    then 130. The launcher gets SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2.

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

    given = {name: value for name, value in options.items() if value not in (None, "")}
    job = Job(env=dict(name_and_value(text) for text in env), command=command, **given)
    launch = plan(job, profile or "", num_ranks, os.environ)
    click.echo(launch.why, err=True)
    if dry_run:
        sys.stdout.buffer.write(os.fsencode(launch.line()) + b"\n")
        return
    click.echo(launch.about, err=True)
    click.get_current_context().exit(run_launcher(launch.argv, launch.environ(os.environ)))
