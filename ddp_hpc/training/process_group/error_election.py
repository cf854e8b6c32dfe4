"""The result of the election that decides which failed rank reports its error. Does not import torch."""

from __future__ import annotations

from enum import Enum


class ErrorElection(Enum):
    """Whether this rank reports its error, or another rank has already done so."""

    WON = "this rank failed first: it reports the error"
    LOST = "another rank has already reported an error: this one prints nothing"
    NO_STORE = "the store is not available: report once per node"
