"""The report that ranks send to each other every few steps."""

from __future__ import annotations

from typing import NamedTuple


class RankReport(NamedTuple):
    """One rank's report. It contains only numbers, because all reports are sent in one tensor."""

    stop_request: float
    """The number of the reason to stop, or 0."""
    save_due: float
    """1 if the last snapshot is too old. Only rank 0 decides."""
    step_s: float
    """Mean time of a step."""
    own_s: float
    """Mean time per step that the rank spent without waiting for others."""
