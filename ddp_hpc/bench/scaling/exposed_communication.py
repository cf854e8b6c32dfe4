"""Computes the share of exposed communication in traced steps."""

from __future__ import annotations

import statistics
from importlib.util import find_spec
from pathlib import Path

TRACES = "trace"
_NEEDS = ("numpy", "msgspec")


def communication_share(directory: Path) -> float | None:
    """Returns the mean share over the ranks traced in `directory`/trace, or None if it is unknown.

    It is computed as in `ddp-hpc report`, and includes waiting for slower ranks. Traces that are damaged or
    contain no collectives are skipped, since the names of a backend's collectives may be unknown.
    """
    if missing():
        return None
    from ddp_hpc.trace.analyze_rank import read_rank

    shares = []
    for path in sorted((directory / TRACES).glob("*.json.gz")):
        try:
            trace = read_rank(path)
        except OSError:
            continue
        if trace.steps and trace.collectives:
            times = [step.times for step in trace.steps]
            shares.append(sum(one.comm_exposed_s for one in times) / sum(one.wall_s for one in times))
    return statistics.fmean(shares) if shares else None


def missing() -> str:
    """Returns a package required for reading traces that is not installed, or an empty string."""
    return next((name for name in _NEEDS if find_spec(name) is None), "")
