"""The report that ranks send to each other every few steps."""

from __future__ import annotations

from typing import NamedTuple


class RankReport(NamedTuple):
    """One rank's report. It contains only numbers, because all reports are sent in one tensor."""

    stop_request: float
    """The stop request as a number; 0 if this rank does not request a stop."""
    save_due: float
    """1 if a snapshot is due because the last one is too old, otherwise 0. Only rank 0 checks this."""
    step_s: float
    """Mean time of a step."""
    own_s: float
    """Mean time per step that the rank spent without waiting for others."""
