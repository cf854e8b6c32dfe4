"""Prints the error with which a job ends: one line for the whole job, or one for each node without a store.

This module does not import torch, because it also handles errors that occur before torch is imported.
"""

from __future__ import annotations

import contextlib
import os
import sys
from enum import Enum

from ddp_hpc.discovery.launcher_environment import peek_rank, present_launchers
from ddp_hpc.discovery.print_once_per_node import print_once_per_node
from ddp_hpc.discovery.world import World, short_hostname


class ErrorElection(Enum):
    """Whether this rank reports its error, or another rank has already done so."""

    WON = "this rank failed first: it reports the error"
    LOST = "another rank has already reported an error: this one prints nothing"
    NO_STORE = "the store is not available: report once per node"


def print_error(election: ErrorElection, text: str, world: World | None) -> None:
    """Prints the error as one line; a traceback is printed unchanged, without a label."""
    line = text if "\n" in text else f"error: {text}"
    if election is ErrorElection.NO_STORE:
        print_once_per_node(f"{_own_prefix(world)}{line}", os.environ)
    elif election is ErrorElection.WON:
        prefix = world.prefix if world is not None and world.world_size > 1 else ""
        # One write, so that lines of different ranks do not mix. Errors such as a full disk are ignored.
        with contextlib.suppress(OSError, AttributeError):
            sys.stderr.write(f"{prefix}{line}\n")
            sys.stderr.flush()


def _own_prefix(world: World | None) -> str:
    """Returns the prefix of an error line, also if the rank is known only from the environment."""
    if world is not None:
        return world.prefix
    if present_launchers(os.environ):
        return f"[rank {peek_rank(os.environ)} {short_hostname()}] "
    return f"[{short_hostname()}] "
