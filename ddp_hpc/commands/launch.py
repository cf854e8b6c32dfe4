"""`ddp-hpc launch`."""

from __future__ import annotations

import os
import signal
import sys

import click

from ddp_hpc.commands.job_options import TAKES_A_COMMAND, name_and_value
from ddp_hpc.errors import RequestError


@click.command("launch", context_settings=TAKES_A_COMMAND)
@click.option("-n", "num_ranks", type=int, metavar="N", help="Ranks in all.  [nodes x ranks a node]")
@click.option(
    "--ranks-per-node", type=int, metavar="R", help="Ranks on each node.  [its GPUs, else by its cores]"
)
@click.option(
    "--profile", metavar="NAME", help="The site: see `ddp-hpc profiles list`. Else it is found out."
)
@click.option(
    "--launcher", metavar="mpiexec|srun|torchrun", help="What starts the ranks.  [as the profile says]"
)
@click.option(
    "--mpi", metavar="none|pmi2|pmix|cray_shasta", help="How srun starts MPI ranks.  [the site's default]"
)
@click.option("--env", multiple=True, metavar="NAME=VALUE", help="A variable for the ranks; may be repeated.")
@click.option("--fallback", metavar="NAME", help="The profile's other settings for ranks that hang.")
@click.option("--dry-run", is_flag=True, help="Print the line and start nothing.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def command(
    num_ranks: int | None,
    ranks_per_node: int | None,
    profile: str | None,
    launcher: str | None,
    mpi: str | None,
    env: tuple[str, ...],
    fallback: str | None,
    dry_run: bool,
    command: tuple[str, ...],
) -> None:
    """Start COMMAND as ranks: on the nodes of the allocation this shell is in, or on this machine.

    The launcher, its binding and the variables are those of the site's profile, as a rendered job script
    has them. Modules are yours to load. This process becomes the launcher: signals and the exit code are
    the launcher's own.

    \b
    Examples:
      ddp-hpc launch -n 8 python -m ddp_hpc.train --epochs 1
      ddp-hpc launch --dry-run -- python train.py --lr 0.1
      ddp-hpc launch --ranks-per-node 2 --env NCCL_DEBUG=INFO -- python train.py
      ddp-hpc launch --launcher torchrun -- python train.py
      ddp-hpc launch --profile local -n 2 -- ./my_program
    """  # noqa: D301 - a true \b tells click to leave the lines alone
    if not command:
        raise RequestError(
            "nothing to start was given; a program is needed: ddp-hpc launch -n 8 -- python -m ddp_hpc.train"
        )
    from ddp_hpc.batch.job import Job
    from ddp_hpc.batch.launch import plan

    job = Job(
        ranks_per_node=ranks_per_node,
        launcher=launcher or "",
        mpi=mpi or "",
        env=dict(name_and_value(text) for text in env),
        fallback=fallback or "",
        command=command,
    )
    launch = plan(job, profile or "", num_ranks, os.environ)
    click.echo(launch.why, err=True)
    if dry_run:
        sys.stdout.buffer.write(os.fsencode(launch.line()) + b"\n")
        return
    click.echo(launch.about, err=True)
    # Python ignores these, and a program that is executed would inherit that.
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(ignored, signal.SIG_DFL)
    try:
        os.execve(launch.argv[0], launch.argv, launch.environ(os.environ))  # noqa: S606 - an argv list
    except OSError as error:
        raise RequestError(
            f"{launch.argv[0]} cannot be started ({error.strerror}); look at its file"
        ) from None
