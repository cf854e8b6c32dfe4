"""One rank's failure ends the job, with that rank's words and nobody else's.

The rank that fails first says so in the store. A thread in every other rank
waits for that on a connection of its own and ends its process, also when the
main thread is stuck in a collective that can never finish.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from datetime import timedelta

from ddp_hpc.errors import EXIT_FAILED
from ddp_hpc.training.store_comm import Store

_CLAIM, _MESSAGE, _LEFT = "failure/claim", "failure/message", "failure/left"
_FOREVER = timedelta(days=365)
_GRACE_S = 3.0  # for the main thread to end in its own way, or for the others to hear of it


# What gloo, NCCL and the store say when another rank is gone or does not come.
_LOST = (
    "gloo",
    "connection closed by peer",
    "connection reset by peer",
    "nccl",
    "timed out",
    "tcpstore",
    "socket",
)


def explain_lost_contact(error: BaseException, timeout_s: float) -> str:
    """One line for an error that only tells that another rank is gone or stuck; empty for any other error."""
    import torch.distributed as dist

    text = str(error)
    if not isinstance(error, RuntimeError) or not dist.is_initialized():
        return ""
    if not isinstance(error, dist.DistError) and not any(word in text.lower() for word in _LOST):
        return ""
    cause = " ".join(text.partition("\n")[0].split())[:300]
    return (
        f"lost contact with another rank in a collective ({cause}); it ended or does not come: look for its "
        f"own error above or in its node's log; a rank waits {timeout_s:g} s for the others (--timeout)"
    )


class FailureWatch:
    """This rank's end of the wire; close it before the store goes away in peace."""

    def __init__(self, store: Store, rank: int) -> None:
        self._store = store
        self._rank = rank
        self._closed = threading.Event()
        self._claimed = False
        # A waiting call holds its connection: the watcher needs another one.
        own_connection = store.clone()  # type: ignore[attr-defined]  # missing from torch's stubs
        self._thread = threading.Thread(target=self._watch, args=(own_connection,), daemon=True)
        self._thread.start()

    def claim(self, message: str) -> bool:
        """True where this rank is the first to fail, and so the one to print; the others then stop."""
        self._claimed = True
        self._closed.set()
        try:
            if self._store.add(_CLAIM, 1) != 1:
                return False
            self._store.set(_MESSAGE, message)
        except RuntimeError:
            # Rank 0 and its store are gone. Whoever is left must not stay silent, unless rank 0
            # itself has said why before it went.
            return not self._heard
        if self._rank == 0:
            time.sleep(1.0)  # the store lives here: let the others hear of it
        return True

    def close(self, size: int) -> None:
        """The peaceful end, after the last barrier. Collective: every rank must call this.

        The store lives in rank 0 (or in torchrun's agent): it is left by all others
        first, or their last requests would meet a closed door.
        """
        self._closed.set()
        if self._rank == 0:
            self._store.set(_MESSAGE, "")
        self._thread.join(_GRACE_S)
        if self._rank != 0:
            self._store.add(_LEFT, 1)
            return
        end_s = time.monotonic() + _GRACE_S
        while self._store.add(_LEFT, 0) < size - 1 and time.monotonic() < end_s:
            time.sleep(0.01)

    _heard = False

    def _watch(self, store: Store) -> None:
        try:
            store.wait([_MESSAGE], _FOREVER)
            if self._closed.is_set() or not store.get(_MESSAGE):
                return
        except RuntimeError:
            # The store went away. In the main thread the next collective fails and tells why.
            return
        self._heard = True
        if self._closed.wait(_GRACE_S):
            return
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        # Not sys.exit: the main thread may never return from a collective. No message: the rank
        # that failed has said it.
        os._exit(EXIT_FAILED)
