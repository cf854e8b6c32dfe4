"""One rank's failure ends the job, with that rank's words and nobody else's.

The rank that fails first says so in the store. A thread in every other rank
waits for that on a connection of its own and ends its process, also when the
main thread is stuck in a collective that can never finish.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta

from ddp_hpc.errors import EXIT_FAILED
from ddp_hpc.training.claim import Claim
from ddp_hpc.training.store_comm import Store

_CLAIM, _VERDICT, _LEFT = "failure/claim", "failure/verdict", "failure/left"
_PEACE, _FAILED = b"peace", b"failed"
_FOREVER = timedelta(days=365)
_GRACE_S = 3.0  # for the main thread to end in its own way, or for the others to hear of it
_LEAVE_S = 30.0  # for the others to be done with the store

# What gloo, NCCL and the store say when another rank is gone or does not come.
_LOST = (
    "connection closed",
    "connection reset",
    "connection refused",
    "broken pipe",
    "timed out",
    "timeout",
    "remote process",
    "remote error",
)


def explain_lost_contact(error: BaseException, timeout_s: float) -> str:
    """One line for an error that only tells that another rank is gone or stuck; empty for any other error."""
    text = str(error)
    if not isinstance(error, RuntimeError) or not any(word in text.lower() for word in _LOST):
        return ""
    if "gloo" not in text and not type(error).__name__.startswith("Dist"):
        return ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    # NCCL puts what really happened behind this, not into its first line.
    cause = next((line for line in lines if line.startswith("Last error")), lines[0])
    cause = cause.partition(". This is typically")[0][:300]  # gloo's advice, with a pictogram
    return (
        f"lost contact with another rank in a collective ({cause}); it ended or does not come: look for its "
        f"own error above or in its node's log; a rank waits {timeout_s:g} s for the others (--timeout)"
    )


class FailureWatch:
    """This rank's end of the wire; `close` it before the store goes away in peace.

    `on_lost_store` is called, once, where the store vanished and the main thread did
    not notice within a few seconds; the process then ends.
    """

    def __init__(self, store: Store, rank: int, size: int, on_lost_store: Callable[[], None]) -> None:
        # A call of the main thread that waits would hold the connection, and with it the word of a failure.
        self._store: Store = store.clone()  # type: ignore[attr-defined]  # missing from torch's stubs
        self._rank = rank
        self._size = size
        self._on_lost_store = on_lost_store
        self._closed = threading.Event()
        self.heard = False
        """Another rank failed: this one is to end, without a word."""
        # A waiting call holds its connection: the watcher needs another one.
        own_connection = store.clone()  # type: ignore[attr-defined]  # missing from torch's stubs
        self._thread = threading.Thread(target=self._watch, args=(own_connection,), daemon=True)
        self._thread.start()

    def claim(self) -> Claim:
        """Whether this rank is the first to fail, and so the one to speak; the others then stop."""
        self._closed.set()
        # Looked at before the claim: a second rank that fails at once may tell ours of it in between.
        heard = self.heard
        try:
            is_first = self._store.add(_CLAIM, 1) == 1 and not heard
            self._store.set(_VERDICT, _FAILED.decode())
        except RuntimeError:
            return Claim.LATE if self.heard else Claim.ALONE
        if self._rank == 0:
            time.sleep(1.0)  # the store lives here: let the others hear of it
        return Claim.FIRST if is_first else Claim.LATE

    def close(self) -> None:
        """The end that all ranks reach together. Collective: every rank must call this.

        The store lives in rank 0 (or in torchrun's agent): it is left by all others
        first, or their last requests would meet a closed door. What goes wrong here
        is no failure of the work, which is done.
        """
        self._closed.set()
        with contextlib.suppress(RuntimeError):
            if self._rank == 0:
                self._store.set(_VERDICT, _PEACE.decode())
            self._thread.join(_GRACE_S)
            if self._rank != 0:
                self._store.add(_LEFT, 1)
                return
            end_s = time.monotonic() + _LEAVE_S
            while self._store.add(_LEFT, 0) < self._size - 1 and time.monotonic() < end_s:
                time.sleep(0.01)

    def _watch(self, store: Store) -> None:
        try:
            store.wait([_VERDICT], _FOREVER)
            if store.get(_VERDICT) == _PEACE:
                return
            self.heard = True
        except RuntimeError:
            # Rank 0 died with the store. The next collective tells the main thread, if it ever gets there.
            if self._closed.wait(_GRACE_S):
                return
            self._on_lost_store()
            self.heard = True
        if self._closed.is_set():
            return
        # First as the launcher would: a file that is being written is then removed.
        os.kill(os.getpid(), signal.SIGTERM)
        if self._closed.wait(_GRACE_S):
            return
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        # The main thread may never return from a collective. No message: the rank that failed has said it.
        os._exit(EXIT_FAILED)
