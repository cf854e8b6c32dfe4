"""A `Comm` over the ranks' store, for small messages that do not depend on NCCL or its watchdog."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TypeVar

from ddp_hpc.base.errors import RendezvousError
from ddp_hpc.discovery.rank_communication import Members
from ddp_hpc.rendezvous.store_client import StoreClient, StoreLostError

T = TypeVar("T")
A = TypeVar("A")

_ENDED = ": the store on rank 0 has ended"
_RANK_0 = "rank 0 and all other ranks at {}"


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
        return json.loads(self._get(key, f"rank 0 to send {key}"))  # type: ignore[no-any-return]  # the JSON text of a T decodes to a T

    def allgather(self, value: T) -> list[T]:
        """Returns every rank's value, in rank order. Collective: every rank must call this.

        Rank 0 collects the values and sends one list, which takes 2 N messages instead of N x N.
        """
        return self.combine(value, lambda values: values)

    def combine(self, value: T, rule: Callable[[list[T]], A]) -> A:
        """Returns the answer that `rule` computes on rank 0. Collective: every rank must call this."""
        return self._answer("allgather", value, rule)

    def gather(self, what: str, value: T) -> list[T]:
        """Returns every rank's value on rank 0, in rank order, and an empty list on the others.

        The other ranks do not wait.

        Collective: every rank must call this.
        """
        return self._gather(self._next_key(what), what, value)

    def members(self, group: str, value: T) -> Members[T]:
        """Returns the values of the ranks that specify the same `group`.

        Collective: every rank must call this.
        """
        what = "the ranks of each node"
        key = self._next_key(what)
        groups: dict[str, list[T]] = {}
        for name, theirs in self._gather(key, what, (group, value)):
            groups.setdefault(name, []).append(theirs)
        for index, (name, values) in enumerate(groups.items()):
            self._set(f"{key}/of {name}", json.dumps([values, index, len(groups)]))
        return Members(*json.loads(self._get(f"{key}/of {group}", _RANK_0.format(what))))

    def barrier(self, what: str) -> None:
        """Returns once all ranks have called it; an error names `what` and the missing ranks.

        Collective: every rank must call this.
        """
        self._answer(what, None, lambda _: None)

    def _answer(self, what: str, value: T, rule: Callable[[list[T]], A]) -> A:
        key = self._next_key(what)
        values = self._gather(key, what, value)
        if self.rank == 0:
            text = json.dumps(rule(values)).encode()
            self._set(key, text.decode())
        else:
            text = self._get(key, _RANK_0.format(what))
        return json.loads(text)  # type: ignore[no-any-return]  # as above

    def _gather(self, key: str, what: str, value: T) -> list[T]:
        self._store.give(key, self.rank, json.dumps(value).encode(), self._limit_s)
        if self.rank != 0:
            return []
        try:
            return [json.loads(text) for text in self._store.take(key, self.size, self._limit_s)]
        except RendezvousError as error:
            raise RendezvousError(f"{self._waited(what)}{self._missing(key)}") from error

    def _next_key(self, what: str) -> str:
        self._num_calls += 1
        return f"comm/{self._num_calls}/{what}"

    def _set(self, key: str, text: str) -> None:
        self._store.set(key, text.encode(), self._limit_s)

    @property
    def _limit_s(self) -> float:
        # Only rank 0 knows the missing ranks, so its time limit must be the shortest.
        return self.timeout_s + (0.0 if self.rank == 0 else min(10.0, self.timeout_s))

    def _get(self, key: str, what: str) -> bytes:
        try:
            return self._store.get([key], self._limit_s)[0]
        except StoreLostError as error:
            raise RendezvousError(f"{self._waited(what)}{_ENDED}") from error
        except RendezvousError as error:
            raise RendezvousError(self._waited(what)) from error

    def _waited(self, what: str) -> str:
        return f"rank {self.rank} waited without success (limit {self._limit_s:g} s) for {what}"

    def _missing(self, key: str) -> str:
        try:
            given = self._store.given(key, self.timeout_s)
        except StoreLostError:
            return _ENDED
        except RendezvousError:
            return ""
        missing = [str(rank) for rank in range(self.size) if rank not in given]
        names = ", ".join(missing[:8]) + (", ..." if len(missing) > 8 else "")
        return f": rank {names} did not arrive"
