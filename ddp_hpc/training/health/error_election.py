"""Which rank reports the error when several fail. Does not import torch: errors may occur before that."""

from __future__ import annotations

from enum import Enum


class Claim(Enum):
    """Whether this rank reports its failure."""

    FIRST = "this rank failed first: it reports the error"
    LATE = "another rank has already reported an error: this one stays silent"
    ALONE = "the store is not available: report once per node"
