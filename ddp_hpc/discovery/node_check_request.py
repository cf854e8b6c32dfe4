"""The request of the supervisor to check the nodes: ranks then run `python -m ddp_hpc.node_check` instead.

The check uses the launch line of the program, and therefore the same launcher, binding and environment.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

NODE_CHECK = "DDP_HPC_NODE_CHECK"
"""The directory for the results of the check; set only while the nodes are checked."""
EARLIER_LAUNCHES = "DDP_HPC_EARLIER_LAUNCHES"
"""The values of DDP_HPC_LAUNCH of earlier starts in this job, of which no process may be left."""
MODULE = "ddp_hpc.node_check"


def run_check_if_requested(environ: Mapping[str, str]) -> None:
    """Replaces this process with the check of nodes if the supervisor has requested it."""
    if environ.get(NODE_CHECK):
        os.execv(sys.executable, [sys.executable, "-m", MODULE])  # noqa: S606 - an argv list
