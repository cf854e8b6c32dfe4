"""A time limit that works even while C code never returns to Python.

MPI_Init waits forever for a rank that did not start, and may hold the GIL
meanwhile, so no Python thread can end it. A forked child can: it sleeps on a
pipe, and after the time limit it prints what its parent was waiting for, and
kills the parent.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Watchdog:
    """A running time limit. `stage` describes the current wait for the error message."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe

    def stage(self, text: str) -> None:
        """Sets the description of the current wait, which is part of the error message."""
        os.write(self._pipe, text.replace("\n", " ")[:2000].encode() + b"\n")


@contextmanager
def time_limit(limit_s: float, prefix: str) -> Iterator[Watchdog]:
    """Kills this process with SIGKILL and prints one line to stderr if the block takes longer than `limit_s`.

    Only SIGKILL ends a process that is stuck in C code; launchers and shells show 137. The line
    is `PREFIXerror: waited N s STAGE`, with the last text given to `Watchdog.stage`.
    """
    reader, writer = os.pipe()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        _watch(reader, writer, limit_s, prefix)
    os.close(reader)
    try:
        yield Watchdog(writer)
    finally:
        os.close(writer)
        os.waitpid(child, 0)


def _watch(reader: int, writer: int, limit_s: float, prefix: str) -> None:
    """Runs in the forked child. It must not use locks: a lock that was held at the fork stays locked."""
    try:
        os.close(writer)
        # The inherited sockets of the launcher must not stay open if the parent dies.
        for low, high in ((3, reader), (reader + 1, 4096)):
            os.closerange(low, high)
        # The parent handles Ctrl-C and the signals of the launcher.
        for sig in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(sig, signal.SIG_IGN)
        parent, end, stage = os.getppid(), time.monotonic() + limit_s, b"for the other ranks"
        while (left := end - time.monotonic()) > 0:
            ready, _, _ = select.select([reader], [], [], left)
            if ready:
                text = os.read(reader, 65536)
                if not text:
                    os._exit(0)
                stage = text.strip().rpartition(b"\n")[2]
        os.write(2, f"{prefix}error: waited {limit_s:g} s ".encode() + stage + b"\n")
        if os.getppid() == parent:
            os.kill(parent, signal.SIGKILL)
    finally:
        os._exit(0)
