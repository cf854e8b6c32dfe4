"""How much of the traced steps went to communication that no computation hid."""

from __future__ import annotations

import statistics
from importlib.util import find_spec
from pathlib import Path

TRACES = "trace"
_NEEDS = ("numpy", "msgspec")


def communication_share(folder: Path) -> float | None:
    """The mean over the ranks traced in `folder`/trace, as `ddp-hpc report` has it; None: nobody can tell.

    Waiting for a slower rank is communication. A trace that is damaged, or has no collective in it, is left
    out: a backend may have names that are not known.
    """
    if missing():
        return None
    from ddp_hpc.trace.rank import read_rank

    shares = []
    for path in sorted((folder / TRACES).glob("*.json.gz")):
        try:
            trace = read_rank(path)
        except OSError:
            continue
        if trace.steps and trace.collectives:
            times = [step.times for step in trace.steps]
            shares.append(sum(one.comm_exposed_s for one in times) / sum(one.wall_s for one in times))
    return statistics.fmean(shares) if shares else None


def missing() -> str:
    """A package that reading traces needs and that is not installed, as on some login nodes; else empty."""
    return next((name for name in _NEEDS if find_spec(name) is None), "")
