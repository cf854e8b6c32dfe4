"""A check that the ranks which the launcher started train together."""

from __future__ import annotations

import os

from ddp_hpc.errors import RequestError


def refuse_separate_ranks(world_size: int, remedy: str) -> None:
    """Checks the number of ranks in the world of a Trainer. `remedy` is the advice in the error message.

    Raises:
        RequestError: the launcher started several ranks, but the Trainer trains separately on each of them.
    """
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size == 1 < num_ranks:
        raise RequestError(
            f"{num_ranks} ranks were started, but the Trainer trains separately on each of them; {remedy}"
        )
