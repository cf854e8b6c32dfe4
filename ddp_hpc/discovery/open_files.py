"""The limit on the open files of a process. Connections count as open files."""

from __future__ import annotations

import math
import resource
from contextlib import suppress


def raise_file_limit() -> float:
    """Raises the limit on open files of this process to the hard limit, and returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return math.inf if limit == resource.RLIM_INFINITY else limit
