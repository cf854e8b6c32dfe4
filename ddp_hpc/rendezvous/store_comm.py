"""A `Comm` over the ranks' store, for small messages that do not depend on NCCL or its watchdog."""

from __future__ import annotations

import json
from typing import TypeVar

from ddp_hpc.errors import RendezvousError
from ddp_hpc.rendezvous.store_client import StoreClient, StoreLostError

T = TypeVar("T")


class StoreComm:
    """Exchanges JSON messages between all ranks.

    Calls are numbered. If ranks call the methods in different orders, they do not receive wrong messages.
    Instead, they wait until the time limit, and rank 0 reports the missing ranks.
    """

    def __init__(self, store: StoreClient, rank: int, size: int, timeout_s: float) -> None:
        self._store = store
        self.rank = rank
        self.size = size
        self.timeout_s = timeout_s  # limit of each call; the rendezvous and the training use different limits
        self._num_calls = 0

    def bcast(self, value: T) -> T:
        """Returns rank 0's value. Collective: every rank must call this."""
        key = self._next_key("bcast")
        if self.rank == 0:
            self._set(key, json.dumps(value))
            return value
        return json.loads(self._get([key], f"rank 0 to send {key}")[0])  # type: ignore[no-any-return]  # the JSON text of a T decodes to a T

    def allgather(self, value: T) -> list[T]:
        """Returns every rank's value, in rank order. Collective: every rank must call this.

        Rank 0 collects the values and sends one list, which takes 2 N messages instead of N x N.
        """
        return self._collect("allgather", value)

    def gather(self, what: str, value: T) -> list[T]:
        """Returns every rank's value on rank 0, in rank order, and an empty list on the others.

        The other ranks do not wait.

        Collective: every rank must call this.
        """
        key = self._next_key(what)
        self._set(f"{key}/{self.rank}", json.dumps(value))
        return [json.loads(text) for text in self._gathered(key, what)] if self.rank == 0 else []

    def barrier(self, what: str) -> None:
        """Returns once all ranks have called it; an error names `what` and the missing ranks.

        Collective: every rank must call this.
        """
        self._collect(what, None)

    def _collect(self, what: str, value: T) -> list[T]:
        key = self._next_key(what)
        self._set(f"{key}/{self.rank}", json.dumps(value))
        if self.rank == 0:
            text = b"[" + b",".join(self._gathered(key, what)) + b"]"
            self._set(key, text.decode())
        else:
            text = self._get([key], f"rank 0 and all other ranks at {what}")[0]
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
        # Only rank 0 knows the missing ranks, so its time limit must be the shortest.
        return self.timeout_s + (0.0 if self.rank == 0 else min(10.0, self.timeout_s))

    def _get(self, keys: list[str], what: str) -> list[bytes]:
        try:
            return self._store.get(keys, self._limit_s)
        except RendezvousError as error:
            text = f"rank {self.rank} waited without success (limit {self._limit_s:g} s) for {what}"
            raise RendezvousError(f"{text}{self._missing(keys)}") from error

    def _missing(self, keys: list[str]) -> str:
        try:
            missing = [key.rpartition("/")[2] for key in keys if not self._store.check([key], self.timeout_s)]
        except StoreLostError:
            return ": the store on rank 0 has ended"
        except RendezvousError:
            return ""
        names = ", ".join(missing[:8]) + (", ..." if len(missing) > 8 else "")
        return f": rank {names} did not arrive" if len(keys) > 1 else ""
