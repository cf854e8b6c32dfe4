"""Job arrays in a rehearsal: their indices, and the one task that runs."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_hpc.base.errors import RequestError
from ddp_hpc.rehearse.launchers.options import RefusedError
from ddp_hpc.rehearse.settings import Settings
from ddp_hpc.request.queue_options import parse_array


def parse_indices(text: str, error: RefusedError) -> tuple[int, ...]:
    """Returns the indices of a list such as `0-3`, `1,5,7` or `0-30:10%2`, in ascending order.

    Raises:
        RefusedError: `error`, if the text has another format or a range is empty.
    """
    try:
        array = parse_array(text.partition("%")[0])
    except RequestError:
        raise error from None
    return tuple(sorted({index for one in array.ranges for index in one}))


def rehearsed_index(settings: Settings, indices: Sequence[int]) -> int:
    """Returns the index of the only task that a rehearsal runs."""
    return settings.array_index if settings.array_index in indices else indices[0]
