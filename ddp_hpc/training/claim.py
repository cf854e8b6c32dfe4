"""Who speaks when several ranks fail. No torch: also the errors before it is imported end here."""

from __future__ import annotations

from enum import Enum


class Claim(Enum):
    """Whose word counts, when this rank fails."""

    FIRST = "this rank failed first: it speaks"
    LATE = "another rank has spoken: silence"
    ALONE = "there is no store to ask: once a node has to do"
