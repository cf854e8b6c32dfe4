"""The election of the rank that reports the error if several fail. Imported before torch."""

from __future__ import annotations

from enum import Enum


class ErrorElection(Enum):
    """The result of the election, which states whether this rank reports its error."""

    WON = "this rank failed first: it reports the error"
    LOST = "another rank has already reported an error: this one prints nothing"
    NO_STORE = "the store is not available: report once per node"
