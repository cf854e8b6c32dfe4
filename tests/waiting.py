"""Waits for conditions that other processes or threads make true."""

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], object], limit_s: float = 60.0) -> None:
    """Returns once the condition is true; fails after the limit."""
    end_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end_s, "the condition did not become true in time"
        time.sleep(0.02)
