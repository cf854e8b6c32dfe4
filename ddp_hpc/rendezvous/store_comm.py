"""The ranks as a `Comm` over their store: small messages that no NCCL watchdog can time out."""

from __future__ import annotations

import json
from typing import TypeVar

from ddp_hpc.errors import RendezvousError
from ddp_hpc.rendezvous.store_client import StoreClient, StoreLostError

T = TypeVar("T")


class StoreComm:
    """Messages are JSON. Calls are numbered, so ranks that disagree on the order of their calls wait until
    the time limit, and rank 0 names who is missing, rather than read each other's messages.
    """

    def __init__(self, store: StoreClient, rank: int, size: int, timeout_s: float) -> None:
        self._store = store
        self.rank = rank
        self.size = size
        self.timeout_s = timeout_s  # per call; joining has another limit than training
        self._num_calls = 0

    def bcast(self, value: T) -> T:
        """Rank 0's value. Collective: every rank must call this."""
        key = self._next_key("bcast")
        if self.rank == 0:
            self._set(key, json.dumps(value))
            return value
        return json.loads(self._get([key], f"rank 0 to send {key}")[0])  # type: ignore[no-any-return]  # JSON of a T is a T here

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
        self._set(f"{key}/{self.rank}", json.dumps(value))
        return [json.loads(text) for text in self._gathered(key, what)] if self.rank == 0 else []

    def barrier(self, what: str) -> None:
        """Returns once all ranks have come; an error names `what` and who is missing. Collective."""
        self._collect(what, None)

    def _collect(self, what: str, value: T) -> list[T]:
        key = self._next_key(what)
        self._set(f"{key}/{self.rank}", json.dumps(value))
        if self.rank == 0:
            text = b"[" + b",".join(self._gathered(key, what)) + b"]"
            self._set(key, text.decode())
        else:
            text = self._get([key], f"rank 0 and all others at {what}")[0]
        return json.loads(text)  # type: ignore[no-any-return]  # as above

    def _gathered(self, key: str, what: str) -> list[bytes]:
        return self._get([f"{key}/{rank}" for rank in range(self.size)], what)

    def _next_key(self, what: str) -> str:
        self._num_calls += 1
        return f"comm/{self._num_calls}/{what}"

    def _set(self, key: str, text: str) -> None:
        self._store.set(key, text.encode(), self._limit_s)

    @property
    def _limit_s(self) -> float:
        # Rank 0 knows who is missing: it is to give up first.
        return self.timeout_s + (0.0 if self.rank == 0 else min(10.0, self.timeout_s))

    def _get(self, keys: list[str], what: str) -> list[bytes]:
        try:
            return self._store.get(keys, self._limit_s)
        except RendezvousError as error:
            text = f"rank {self.rank} waited in vain ({self._limit_s:g} s at most) for {what}"
            raise RendezvousError(f"{text}{self._missing(keys)}") from error

    def _missing(self, keys: list[str]) -> str:
        try:
            missing = [key.rpartition("/")[2] for key in keys if not self._store.check([key], self.timeout_s)]
        except StoreLostError:
            return ": the store on rank 0 is gone"
        except RendezvousError:
            return ""
        names = ", ".join(missing[:8]) + (", ..." if len(missing) > 8 else "")
        return f": rank {names} did not come" if len(keys) > 1 else ""
