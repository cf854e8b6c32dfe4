"""Waits for conditions that other processes or threads make true, and how patient all tests are."""

import time
from collections.abc import Callable

PATIENCE = 4.0
"""The factor of all limits, which are those of two cores without other work. On a busy machine, a check that
takes 27 minutes otherwise took 42, and waits of 30 s were too short."""


def wait_until(condition: Callable[[], object], limit_s: float = 60.0) -> None:
    """Returns once the condition is true; fails after the limit."""
    end_s = time.monotonic() + PATIENCE * limit_s
    while not condition():
        assert time.monotonic() < end_s, "the condition did not become true in time"
        time.sleep(0.02)
