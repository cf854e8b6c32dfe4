"""`ddp-hpc exec`."""

from __future__ import annotations

import click

from ddp_hpc.commands.job_options import TAKES_A_COMMAND


@click.command("exec", context_settings=TAKES_A_COMMAND)
@click.argument("program", nargs=-1, type=click.UNPROCESSED)
def command(program: tuple[str, ...]) -> None:
    """Start PROGRAM as this rank, with the variables that torchrun would give it.

    mpiexec, srun and others start `ddp-hpc exec` once a rank. It finds out which rank it is, meets the
    others, and becomes PROGRAM, which finds RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT and
    the others set: init_process_group() works unchanged, and so do Lightning, Accelerate and the Hugging
    Face Trainer. MPI is not started.

    \b
    Examples:
      mpiexec -n 4 ddp-hpc exec -- python train.py
      srun --nodes=2 --ntasks-per-node=4 ddp-hpc exec -- python train.py --lr 0.1
    """  # noqa: D301 - a true \b tells click to leave the lines alone
    from ddp_hpc.exec import main

    main(list(program))
