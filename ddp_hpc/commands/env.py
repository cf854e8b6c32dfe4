"""The command `ddp-hpc env`, which shows the rank, world size and node of this process and their sources."""

from __future__ import annotations

import click


@click.command("env")
@click.option(
    "--discovery",
    default="auto",
    metavar="NAME",
    show_default=True,
    help="Launcher whose environment variables are read. With auto, the launcher is detected.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the results as one JSON object.")
@click.option(
    "--devices",
    is_flag=True,
    help="Also show the number of devices that torch can use, and the variables that select devices.",
)
def command(discovery: str, as_json: bool, devices: bool) -> None:
    """Show the rank, the world size and the address of rank 0 that this process detects, and the source of
    each value.

    \b
    Start this command with the launcher of your job:
      mpiexec -n 4 ddp-hpc env
      srun --nodes=2 ddp-hpc env --json
    """  # noqa: D301 - a true \b keeps click from rewrapping the lines
    from ddp_hpc.discovery.world_report import run
    from ddp_hpc.doctor.gpus import num_devices

    run(discovery=discovery, as_json=as_json, num_devices=num_devices if devices else None)
