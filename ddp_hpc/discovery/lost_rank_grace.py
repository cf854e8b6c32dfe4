"""Gives the other ranks time to report a rank that has exited without MPI_Finalize, under MPICH's mpiexec.

If a rank exits with code 0 in the middle of a run, Hydra kills the other ranks at once and mpiexec returns 0,
so nobody reports the loss. Hydra notices the end of a rank only when all copies of its PMI socket are closed.
Therefore, a small process keeps a copy for some seconds longer, in which the other ranks report the lost rank
and end with an exit code.
"""

from __future__ import annotations

import atexit
import subprocess
from contextlib import suppress

# Longer than the others need to notice the loss, print it and exit: see failure_watch.
GRACE_S = 10
_HOLDER = f"trap '' TERM INT; read -r _ || exec sleep {GRACE_S}"


class LostRankGrace:
    """The process that keeps the socket `fd` open for GRACE_S after this process, unless `end` was called."""

    def __init__(self, fd: int) -> None:
        self._holder: subprocess.Popen[bytes] | None = None
        with suppress(OSError):
            self._holder = subprocess.Popen(
                ["/bin/sh", "-c", _HOLDER],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(fd,),
            )
            atexit.register(self.end)

    def end(self) -> None:
        """Ends the process, because this process exits on purpose. May be called several times."""
        holder, self._holder = self._holder, None
        if holder is not None:
            with suppress(OSError, subprocess.TimeoutExpired):
                holder.communicate(b"\n", timeout=1.0)
