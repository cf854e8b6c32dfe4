"""The cores that this rank can use, and its number of threads. Imports only the standard library."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ddp_hpc.discovery.launcher_environment import Environ


def own_cores() -> list[int]:
    """Returns the cores that the launcher, the scheduler's cgroup or taskset assigned to this process."""
    return sorted(os.sched_getaffinity(0))


def threads_per_rank(
    own: Sequence[int], of_node: Sequence[Sequence[int]], environ: Environ, launcher: str
) -> tuple[int, str]:
    """Returns the number of threads for this rank, and the reason.

    A rank that the launcher has bound to its own cores uses all of them; ranks
    that share a set of cores divide it. OMP_NUM_THREADS can only lower the
    number, because PBS sets it to the cores of a whole chunk in every rank. A
    value of 1 is ignored under torchrun, which sets it if the user has not.

    Args:
        own: this rank's cores.
        of_node: the cores of every rank of this node, including this one.
        environ: the process's environment.
        launcher: the launcher's name.
    """
    sharers = sum(1 for cores in of_node if set(cores) & set(own)) or 1
    share = max(1, len(own) // sharers)
    why = f"{len(own)} cores" + (f" shared by {sharers} ranks" if sharers > 1 else "")
    wanted = environ.get("OMP_NUM_THREADS", "")
    if wanted.isdecimal() and 0 < int(wanted) < share and not (launcher == "torchrun" and wanted == "1"):
        return int(wanted), "OMP_NUM_THREADS"
    return share, why
