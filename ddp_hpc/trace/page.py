"""The report as a page. (Stand-in until the page is there.)"""

from __future__ import annotations

from collections.abc import Sequence

from ddp_hpc.errors import RequestError
from ddp_hpc.trace.model import Capture


def page(captures: Sequence[Capture], sentences: Sequence[str]) -> str:  # noqa: ARG001
    """One page that needs no network."""
    raise RequestError("-o: the page is not there yet")
