"""Work that must not take long, for example because a file system may hang."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress


def in_time(work: Callable[[], object], limit_s: float) -> bool:
    """Runs `work` in a thread, because a file system may hang; returns whether it succeeded in time."""
    done = threading.Event()

    def run() -> None:
        with suppress(Exception):
            work()
            done.set()

    threading.Thread(target=run, name="writer of a diagnosis", daemon=True).start()
    return done.wait(limit_s)
