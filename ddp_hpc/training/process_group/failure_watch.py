"""Ends all ranks of a job when one rank fails; only the error of that rank is reported.

The rank that fails first announces it in the store. A thread in every other
rank waits for this announcement on a separate connection and ends its process, even if the
main thread is stuck in a collective that can never finish.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable

from ddp_hpc.base.errors import EXIT_FAILED, RendezvousError
from ddp_hpc.rendezvous.store_client import Answer, StoreClient, StoreLostError
from ddp_hpc.rendezvous.store_protocol import RANK_0_GONE
from ddp_hpc.training.process_group.print_error import ErrorElection

_ELECTION, _VERDICT, _SAVED = "failure/claim", "failure/verdict", "failure/saved"
_PEACE, _FAILED = b"peace", b"failed"
_GRACE_S = 3.0  # time for the main thread to exit normally
_ANSWER_S = 10.0
_SAVING_S = 20.0  # time for rank 0 to complete the snapshot that it is writing


class FailureWatch:
    """Watches for failures of other ranks, from `begin` until `close`.

    `on_lost_rank_0` is called once if rank 0 exited without reporting a failure, and the main thread did not
    detect this within a few seconds. The argument states how this rank must report the loss of rank 0. The
    process then ends. `finish_writing` completes a snapshot that is being written, within a time limit in
    seconds.
    """

    def __init__(
        self,
        store: StoreClient,
        rank: int,
        on_lost_rank_0: Callable[[ErrorElection], None],
        finish_writing: Callable[[float], None],
    ) -> None:
        self._store, self._rank, self._on_lost_rank_0 = store, rank, on_lost_rank_0
        self._finish_writing = finish_writing
        self._rank_0_has_saved = threading.Event()
        self._closed = threading.Event()
        self._is_over = self._is_ending = False
        self.has_failed_rank = False
        """Whether another rank failed, so that this one ends without reporting an error."""

    def begin(self) -> None:
        """Starts watching: from now on, the failure of another rank ends this process."""
        store = self._store
        try:
            store.when_set(_VERDICT, self._on_answer)
            store.when_set(RANK_0_GONE[0], self._on_answer)
            store.when_set(_SAVED, lambda _: self._rank_0_has_saved.set())
        except StoreLostError as error:
            self._on_answer(error)

    def run_election(self) -> ErrorElection:
        """Returns whether this rank was the first to fail and therefore reports the error. All other ranks
        then stop.
        """
        self._closed.set()
        return self._run_election()

    def let_rank_0_save(self) -> None:
        """Waits until rank 0 has completed its snapshot, because the first rank that exits ends the job.

        Call this method after `run_election`. Rank 0 completes the snapshot here; the others wait for it.
        """
        if self._rank != 0:
            self._rank_0_has_saved.wait(_SAVING_S)
            return
        self._finish_writing(_SAVING_S)
        with contextlib.suppress(RendezvousError):
            self._store.set(_SAVED, b"", _ANSWER_S)

    def close(self) -> None:
        """Stops watching: from now on, the exit of another rank is not a failure. Collective."""
        self._closed.set()
        if self._rank == 0:
            with contextlib.suppress(RendezvousError):
                self._store.set(_VERDICT, _PEACE, _ANSWER_S)
                self._store.goodbye(_ANSWER_S)

    def _run_election(self) -> ErrorElection:
        # Read this before the election, during which the failure of another rank may be announced.
        has_failed_rank = self.has_failed_rank
        try:
            is_first = self._store.add(_ELECTION, 1, _ANSWER_S) == 1 and not has_failed_rank
            self._store.set(_VERDICT, _FAILED, _ANSWER_S)
        except RendezvousError:
            return ErrorElection.LOST if self.has_failed_rank else ErrorElection.NO_STORE
        return ErrorElection.WON if is_first else ErrorElection.LOST

    def _on_answer(self, answer: Answer) -> None:
        """Handles an answer of the store. Must not block, because it runs in the connection's thread."""
        has_verdict = answer in ([_FAILED], [_PEACE])
        if answer != [_FAILED]:
            self._rank_0_has_saved.set()  # rank 0 has exited or leaves, so do not wait for its snapshot
        self._is_over = self._is_over or answer == [_PEACE]
        if self._is_over or self._closed.is_set():
            return
        self.has_failed_rank = self.has_failed_rank or has_verdict
        if not self._is_ending:
            self._is_ending = True
            threading.Thread(target=self._end, args=(has_verdict,), daemon=True).start()

    def _end(self, has_verdict: bool) -> None:
        """Ends this process because another rank failed."""
        if not has_verdict:
            # The main thread detects the exit of rank 0 in its next collective, if it reaches one.
            if self._closed.wait(_GRACE_S):
                return
            self._on_lost_rank_0(self._run_election())
            self.has_failed_rank = True
        if self._closed.is_set():
            return
        # Send SIGTERM first, as a launcher does, so that the main thread can remove an incomplete file.
        os.kill(os.getpid(), signal.SIGTERM)
        if self._rank == 0:
            self.let_rank_0_save()
        if self._closed.wait(_GRACE_S):
            return
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        # The main thread may never return from a collective, so this thread ends the process. It prints
        # no message, because the failed rank reports the error.
        os._exit(EXIT_FAILED)
