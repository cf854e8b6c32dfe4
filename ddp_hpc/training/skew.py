"""The rank that all others wait for: named when its own work takes much longer than theirs."""

from __future__ import annotations

from statistics import median

# So many reports in a row: a single slow one is a page cache or a garbage collection.
_IN_A_ROW = 3
# Below this share of the step it does not matter.
_SHARE = 0.05


class Skew:
    """Looks at the time in which each rank waits for no other: its data and its forward passes.

    A whole step takes equally long on all ranks, as each waits for the slowest.
    """

    def __init__(self, limit: float, hosts: list[str]) -> None:
        self._limit = limit
        self._hosts = hosts
        self._slow = -1
        self._times = 0
        self._named: set[int] = set()

    def look(self, own_s: list[float], step_s: float) -> str:
        """A line that names the straggler once it has been one for a while; else empty.

        `own_s` has every rank's mean time of the last steps, `step_s` is that of a whole step.
        """
        if len(own_s) < 2:
            return ""
        slowest_s, usual_s = max(own_s), median(own_s)
        rank = own_s.index(slowest_s)
        # Of two ranks the median is the mean of both: the other one is what is usual.
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
            f"{slowest_s:.4f} s a step, those of others {usual_s:.4f} s, and all wait for it "
            f"(--skew-limit {self._limit:g})"
        )
