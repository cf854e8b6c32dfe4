"""Detects a rank that all others wait for because its own work takes much longer than theirs."""

from __future__ import annotations

from statistics import median

# Number of consecutive slow reports that are required. A single slow report can be caused by a page cache
# miss or a garbage collection.
_IN_A_ROW = 3
# A delay below this fraction of the step is ignored.
_SHARE = 0.05


class SlowRankDetector:
    """Compares the time that each rank spends without waiting for others: data and forward passes.

    A whole step takes equally long on all ranks, because each waits for the slowest.
    """

    def __init__(self, limit: float, hosts: list[str]) -> None:
        self._limit = limit
        self._hosts = hosts
        self._slow = -1
        self._times = 0
        self._named: set[int] = set()

    def check(self, own_s: list[float], step_s: float) -> str:
        """Returns a line that names the slow rank after several slow reports; otherwise an empty string.

        `own_s` is each rank's mean time without waiting; `step_s` is the mean time of a whole step.
        """
        if len(own_s) < 2:
            return ""
        slowest_s, usual_s = max(own_s), median(own_s)
        rank = own_s.index(slowest_s)
        # With two ranks the median would be the mean of both, so the rank is compared with the other one.
        usual_s = min(own_s) if len(own_s) == 2 else usual_s
        if slowest_s <= self._limit * usual_s or slowest_s - usual_s <= _SHARE * step_s:
            self._slow, self._times = -1, 0
            return ""
        self._times = self._times + 1 if rank == self._slow else 1
        self._slow = rank
        if self._times < _IN_A_ROW or rank in self._named:
            return ""
        self._named.add(rank)
        return (
            f"note: rank {rank} on {self._hosts[rank]} is slow: its data and forward passes take "
            f"{slowest_s:.4f} s per step, those of the others {usual_s:.4f} s, and all wait for it "
            f"(--skew-limit {self._limit:g})"
        )
