"""`python -m ddp_hpc.world.endpoint`, which job scripts of version 0.1 run for torch's c10d rendezvous."""

from __future__ import annotations

import click

from ddp_hpc.rendezvous.torchrun_endpoint import HELP, nodes_option, run, timeout_option


@click.command(help=HELP)
@nodes_option
@timeout_option
def main(num_nodes: int, timeout_s: float) -> None:
    """Print `HOST PORT NODE_RANK LOCAL_ADDR`, and reserve the port, which PyTorch's store then shares."""
    run(num_nodes, timeout_s, for_torch=True, prints_key_file=False)


if __name__ == "__main__":
    main()
