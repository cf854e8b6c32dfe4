"""Job arrays in a rehearsal: their indices, and the one task that runs."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ddp_hpc.rehearse.launchers.options import RefusedError
from ddp_hpc.rehearse.settings import Settings

_RANGE = re.compile(r"([0-9]{1,7})(?:-([0-9]{1,7})(?::([1-9][0-9]{0,6}))?)?")


def parse_indices(text: str, error: RefusedError) -> tuple[int, ...]:
    """Returns the indices of a list such as `0-3`, `1,5,7` or `0-30:10%2`, in ascending order.

    Raises:
        RefusedError: `error`, if the text has another format or a range is empty.
    """
    indices: set[int] = set()
    for part in text.partition("%")[0].split(","):
        match = _RANGE.fullmatch(part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise error
        indices |= set(range(int(match[1]), int(match[2] or match[1]) + 1, int(match[3] or 1)))
    return tuple(sorted(indices))


def rehearsed_index(settings: Settings, indices: Sequence[int]) -> int:
    """Returns the index of the only task that a rehearsal runs."""
    return settings.array_index if settings.array_index in indices else indices[0]
