"""`python -m ddp_hpc.world.endpoint`, as scripts of version 0.1 call it: for torch's c10d rendezvous."""

from __future__ import annotations

import click

from ddp_hpc.rendezvous.torchrun_endpoint import run


@click.command(help="Agree with the other nodes on where the agents of torchrun meet.")
@click.option("--nodes", "num_nodes", type=click.IntRange(min=1), required=True, help="Number of nodes.")
@click.option("--timeout-s", type=float, default=300.0, show_default=True, help="Longest wait for them.")
def main(num_nodes: int, timeout_s: float) -> None:
    """Prints `HOST PORT NODE_RANK LOCAL_ADDR` and keeps the port, which torch's store then shares."""
    run(num_nodes, timeout_s, for_torch=True, prints_key_file=False)


if __name__ == "__main__":
    main()
