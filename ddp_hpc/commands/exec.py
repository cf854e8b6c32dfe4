"""The command `ddp-hpc exec`, which runs a program with the environment variables that torchrun would set."""

from __future__ import annotations

import click

from ddp_hpc.commands.job_options import TAKES_A_COMMAND


@click.command("exec", context_settings=TAKES_A_COMMAND)
@click.argument("program", nargs=-1, type=click.UNPROCESSED)
def command(program: tuple[str, ...]) -> None:
    """Run PROGRAM with the environment variables that torchrun would set for this rank.

    A launcher such as mpiexec or srun starts `ddp-hpc exec` once per rank. It detects its rank, connects to
    the other ranks, sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT and the other variables of
    torchrun, and replaces itself with PROGRAM. In PROGRAM, init_process_group(), Lightning, Accelerate and
    the Hugging Face Trainer then work without changes. The command does not initialize MPI.

    In a job with the supervisor of ddp-hpc, it remains as the parent of PROGRAM and records its exit code
    and, with --rank-logs, its output.

    \b
    Examples:
      mpiexec -n 4 ddp-hpc exec -- python train.py
      srun --nodes=2 --ntasks-per-node=4 ddp-hpc exec -- python train.py --lr 0.1
    """  # noqa: D301 - a true \b keeps click from rewrapping the lines
    from ddp_hpc.exec import main

    main(list(program))
