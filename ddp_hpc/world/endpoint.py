"""`python -m ddp_hpc.world.endpoint`, which scripts of version 0.1 call for torch's c10d rendezvous."""

from __future__ import annotations

import click

from ddp_hpc.rendezvous.torchrun_endpoint import run


@click.command(help="Agree with the other nodes on the rendezvous endpoint of torchrun's agents.")
@click.option("--nodes", "num_nodes", type=click.IntRange(min=1), required=True, help="Number of nodes.")
@click.option(
    "--timeout-s",
    type=float,
    default=300.0,
    show_default=True,
    help="Time limit for the other nodes, in seconds.",
)
def main(num_nodes: int, timeout_s: float) -> None:
    """Prints `HOST PORT NODE_RANK LOCAL_ADDR` and reserves the port, which torch's store then shares."""
    run(num_nodes, timeout_s, for_torch=True, prints_key_file=False)


if __name__ == "__main__":
    main()
