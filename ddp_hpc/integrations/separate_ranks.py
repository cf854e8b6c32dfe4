"""The check of all callbacks that the ranks of a launcher train together."""

from __future__ import annotations

import os

from ddp_hpc.base.errors import RequestError


def refuse_separate_ranks(world_size: int, remedy: str) -> None:
    """Checks that a Trainer of `world_size` ranks uses all ranks. The error message contains `remedy`.

    Raises:
        RequestError: the launcher started several ranks, but the Trainer trains separately on each of them.
    """
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size == 1 < num_ranks:
        raise RequestError(
            f"{num_ranks} ranks were started, but the Trainer trains separately on each of them; {remedy}"
        )
