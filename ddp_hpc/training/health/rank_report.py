"""The report that ranks send to each other every few steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


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
    deadline_s: float = 0.0
    """The end of the job in seconds since the Unix epoch; 0 if unknown. Only rank 0 learns of changes."""


class RankReports:
    """The reports of all ranks: one row for each rank, on the CPU.

    Python objects for the reports of thousands of ranks would delay each exchange by milliseconds.
    """

    def __init__(self, rows: Tensor) -> None:
        columns = rows.unbind(dim=1)
        self._stop_request, self._save_due, self._step_s, self._own_s, self._deadline_s = columns

    def first_stop_request(self) -> tuple[int, int]:
        """Returns the stop request of the first rank with one, and this rank; (0, 0) if there is none."""
        requests = self._stop_request.nonzero()
        if not len(requests):
            return 0, 0
        rank = int(requests[0])
        return int(self._stop_request[rank]), rank

    def save_due(self) -> bool:
        """Returns whether a snapshot is due."""
        return bool(self._save_due[0])

    def deadline_s(self) -> float:
        """Returns the end of the job that rank 0 knows; 0 if it is unknown."""
        return float(self._deadline_s[0])

    def slowest_step_s(self) -> float:
        """Returns the longest mean time of a step."""
        return float(self._step_s.max())

    def own_s(self) -> list[float]:
        """Returns the mean time per step that each rank spent without waiting for others."""
        own_s: list[float] = self._own_s.tolist()
        return own_s
