"""A time limit that holds even inside C code which never returns to Python.

MPI_Init waits for ever for a rank that did not start, and may hold the
interpreter's lock while it does, so no Python thread can end it. A forked child
can: it sleeps on a pipe, and where the time is up it says what was being waited
for and ends its parent.
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
    """The running limit; `stage` says what is waited for from now on."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe

    def stage(self, text: str) -> None:
        """What the message shall say if the time runs out from here on."""
        os.write(self._pipe, text.replace("\n", " ")[:2000].encode() + b"\n")


@contextmanager
def time_limit(limit_s: float, prefix: str) -> Iterator[Watchdog]:
    """Ends this process with SIGKILL and one line on stderr if the block takes longer than `limit_s`.

    Nothing milder ends a process that is stuck in C; launchers and shells show 137. The line
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
    """The child's whole life. Only os-level calls: the parent's locks may be held by nobody here."""
    try:
        os.close(writer)
        # The launcher's sockets, inherited, must not be kept open should the parent die.
        for low, high in ((3, reader), (reader + 1, 4096)):
            os.closerange(low, high)
        # Ctrl-C and the launcher's signals are the parent's business.
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
