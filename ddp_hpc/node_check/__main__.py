"""`python -m ddp_hpc.node_check`: one rank of the check of nodes, which replaces one rank of the program."""

from __future__ import annotations

from ddp_hpc.node_check.rank import main

if __name__ == "__main__":
    main()
