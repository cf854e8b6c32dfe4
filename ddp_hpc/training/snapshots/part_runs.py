"""Where the parts of sharded tensors begin, as arithmetic progressions over the ranks.

A strategy divides a tensor regularly, so a few progressions describe the parts of any number of ranks. For
example, the part of rank 0 begins at row 0, and that of each following rank begins 512 rows later. On a mesh
with several dimensions, progressions are nested.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

Vector = tuple[int, ...]
"""A rank, and the offset of its part along each dimension along which the tensor is divided."""


@dataclass(frozen=True)
class Run:
    """A nested arithmetic progression, with the members `first + i * step + j * other_step + ...`."""

    first: Vector
    repeat: tuple[tuple[int, Vector], ...] = ()
    """The number of members, and the step between them; the outermost progression first."""

    @property
    def num_members(self) -> int:
        """The number of members."""
        return prod(count for count, _ in self.repeat)

    def bounds(self) -> tuple[Vector, Vector]:
        """Returns the smallest and the largest value of each element."""
        lowest, highest = list(self.first), list(self.first)
        for count, step in self.repeat:
            for at, by in enumerate(step):
                (highest if by > 0 else lowest)[at] += (count - 1) * by
        return tuple(lowest), tuple(highest)

    def within(self, lowest: Vector, highest: Vector) -> Iterator[Vector]:
        """Yields the members whose elements are all within these limits, without visiting all members."""
        if not self.repeat:
            if all(low <= at <= high for low, at, high in zip(lowest, self.first, highest, strict=True)):
                yield self.first
            return
        (count, step), inner = self.repeat[0], Run(self.first, self.repeat[1:])
        begin, end = 0, count
        for low, high, by, least, most in zip(lowest, highest, step, *inner.bounds(), strict=True):
            if by < 0:
                low, high, by, least, most = -high, -low, -by, -most, -least
            if by > 0:
                begin, end = max(begin, -((most - low) // by)), min(end, (high - least) // by + 1)
            elif most < low or least > high:
                return
        for number in range(begin, end):
            moved = tuple(at + number * by for at, by in zip(self.first, step, strict=True))
            yield from Run(moved, inner.repeat).within(lowest, highest)


def compressed(members: Iterable[Vector]) -> list[Run]:
    """Returns progressions that have these members in the same order."""
    runs = [Run(member) for member in members]
    while len(joined := list(_joined(runs))) < len(runs):
        runs = joined
    return runs


def _joined(runs: Sequence[Run]) -> Iterator[Run]:
    """Joins consecutive runs that differ only by a constant step in `first`."""
    at = 0
    while at < len(runs):
        first, end, step = runs[at], at + 1, None
        while end < len(runs) and runs[end].repeat == first.repeat:
            pairs = zip(runs[end].first, runs[end - 1].first, strict=True)
            found = tuple(after - before for after, before in pairs)
            if step not in (None, found):
                break
            step, end = found, end + 1
        yield first if step is None else Run(first.first, ((end - at, step), *first.repeat))
        at = end
