"""The limit on the open files of a process. Connections count as open files."""

from __future__ import annotations

import math
import resource
from contextlib import suppress

# Python's modules, data files, pipes of loader workers, and the connections of other programs to open ports.
_OTHER_FILES = 256


def raise_file_limit() -> float:
    """Raises the limit on open files of this process to the hard limit, and returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return file_limit()


def file_limit() -> float:
    """Returns the number of files that this process can open."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return math.inf if soft == resource.RLIM_INFINITY else soft


def num_files_needed(world_size: int) -> int:
    """Returns an estimate of the number of files that each rank opens.

    gloo connects each pair of ranks once per process group, and a mesh has at least two process groups.
    """
    return _OTHER_FILES + 2 * world_size
