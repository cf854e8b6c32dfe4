"""`ddp-hpc exec`."""

from __future__ import annotations

import click

from ddp_hpc.commands.job_options import TAKES_A_COMMAND


@click.command("exec", context_settings=TAKES_A_COMMAND)
@click.argument("program", nargs=-1, type=click.UNPROCESSED)
def command(program: tuple[str, ...]) -> None:
    """Start PROGRAM as this rank, with the environment variables that torchrun would set.

    A launcher such as mpiexec or srun starts `ddp-hpc exec` once per rank. It detects its rank, connects to
    the other ranks, sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT and the other variables of
    torchrun, and replaces itself with PROGRAM. Then init_process_group() works unchanged, and so do
    Lightning, Accelerate and the Hugging Face Trainer. MPI is not initialized.

    \b
    Examples:
      mpiexec -n 4 ddp-hpc exec -- python train.py
      srun --nodes=2 --ntasks-per-node=4 ddp-hpc exec -- python train.py --lr 0.1
    """  # noqa: D301 - a true \b keeps click from rewrapping the lines
    from ddp_hpc.exec import main

    main(list(program))
