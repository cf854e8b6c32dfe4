"""Starts a test cluster by hand: `python -m tests.slurm [--nodes N] -- COMMAND...`; default: a shell."""

from __future__ import annotations

import argparse
import subprocess
import sys

from .cluster import Cluster, ClusterError, Settings, random_prefix


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.slurm", description=__doc__)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--gpus-per-node", type=int, default=4, help="pretended ones (default %(default)s)")
    parser.add_argument("--accounting", action="store_true", help="with slurmdbd and MariaDB")
    parser.add_argument("command", nargs="*", help="default: an interactive bash")
    args = parser.parse_args()
    settings = Settings(
        num_nodes=args.nodes,
        gpus_per_node=args.gpus_per_node,
        node_prefix=random_prefix(),
        accounting=args.accounting,
    )
    try:
        with Cluster(settings) as cluster:
            print(f"nodes {' '.join(cluster.node_names)}, files in {cluster.root}", file=sys.stderr)
            command = cluster.command(args.command or ["bash", "--norc", "-i"])
            return subprocess.run(command, env=cluster.environment()).returncode
    except ClusterError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
