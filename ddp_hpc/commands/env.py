"""`ddp-hpc env`."""

from __future__ import annotations

import click


@click.command("env")
@click.option(
    "--discovery", default="auto", metavar="NAME", show_default=True, help="The launcher to believe."
)
@click.option("--json", "as_json", is_flag=True, help="As one JSON object.")
def command(discovery: str, as_json: bool) -> None:
    """The world this process finds itself in, and where each value came from.

    \b
    Start it as the ranks are started:
      mpiexec -n 4 ddp-hpc env
      srun --nodes=2 ddp-hpc env --json
    """  # noqa: D301 - a true \b tells click to leave the lines alone
    from ddp_hpc.discovery.world_report import run

    run(discovery=discovery, as_json=as_json)
