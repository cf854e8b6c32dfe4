"""The ranks as a `Comm` over torch's store: small messages that no NCCL watchdog can time out."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import TypeVar

# torch re-exports these without naming them in an __all__.
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from ddp_hpc.errors import RendezvousError

__all__ = ["PrefixStore", "Store", "StoreComm", "TCPStore"]

T = TypeVar("T")


class StoreComm:
    """Messages are JSON. Every call is numbered, so ranks that disagree on the order of calls wait in vain
    and rank 0 names who is missing, rather than mix messages up.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout_s: float) -> None:
        self._store = store
        self.rank = rank
        self.size = size
        self.timeout_s = timeout_s  # for one call; the joining ranks have another than the training
        self._calls = 0

    def bcast(self, value: T) -> T:
        """Rank 0's value. Collective: every rank must call this."""
        key = self._next_key("bcast")
        if self.rank == 0:
            self._store.set(key, json.dumps(value))
            return value
        self._wait([key], f"rank 0 to send {key}")
        return json.loads(self._store.get(key))  # type: ignore[no-any-return]  # JSON of a T is a T here

    def allgather(self, value: T) -> list[T]:
        """Every rank's value, by rank. Collective: every rank must call this.

        Rank 0 collects and sends one list, so that the store sees 2 N messages, not N x N.
        """
        return self._collect("allgather", value)

    def gather(self, what: str, value: T) -> list[T]:
        """Every rank's value on rank 0, by rank; nothing on the others, which do not wait.

        Collective: every rank must call this.
        """
        key = self._next_key(what)
        self._store.set(f"{key}/{self.rank}", json.dumps(value))
        return [json.loads(text) for text in self._gathered(key, what)] if self.rank == 0 else []

    def barrier(self, what: str) -> None:
        """Returns once all have come; an error names `what` and who is missing. Collective."""
        self._collect(what, None)

    def _collect(self, what: str, value: T) -> list[T]:
        key = self._next_key(what)
        self._store.set(f"{key}/{self.rank}", json.dumps(value))
        if self.rank == 0:
            self._store.set(key, "[" + ",".join(text.decode() for text in self._gathered(key, what)) + "]")
        else:
            self._wait([key], f"rank 0 and all others at {what}")
        return json.loads(self._store.get(key))  # type: ignore[no-any-return]  # as above

    def _gathered(self, key: str, what: str) -> list[bytes]:
        keys = [f"{key}/{rank}" for rank in range(self.size)]
        self._wait(keys, what)
        return self._store.multi_get(keys)

    def _next_key(self, what: str) -> str:
        self._calls += 1
        return f"{self._calls}/{what}"

    def _wait(self, keys: list[str], what: str) -> None:
        # Rank 0 knows who is missing: it is to give up first.
        limit_s = self.timeout_s + (0.0 if self.rank == 0 else min(10.0, self.timeout_s))
        try:
            self._store.wait(keys, timedelta(seconds=limit_s))
        except RuntimeError as error:
            # DistStoreError for a time-out, DistNetworkError where the store is gone: both are RuntimeErrors.
            raise RendezvousError(
                f"rank {self.rank} waited in vain ({limit_s:g} s at most) for {what}{self._missing(keys)}"
            ) from error

    def _missing(self, keys: list[str]) -> str:
        try:
            missing = [key.rpartition("/")[2] for key in keys if not self._store.check([key])]
        except RuntimeError:
            return ": the store on rank 0 is gone"
        names = ", ".join(missing[:8]) + (", ..." if len(missing) > 8 else "")
        return f": rank {names} did not come" if len(keys) > 1 else ""
