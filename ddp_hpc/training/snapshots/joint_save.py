"""Lets the writing threads of all ranks agree on whether a snapshot is complete.

Each rank reports its part to rank 0, which then completes the snapshot or discards it, and tells the others.
The messages use the ranks' store and not torch's collectives, which the training uses at the same time.
"""

from __future__ import annotations

import json
import threading
import time
import zlib
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ddp_hpc.rendezvous.store_client import StoreClient, StoreTimeoutError

_ANSWER_S = 60.0
_LOOK_S = 0.5  # the interval at which rank 0 checks whether the run is ending


class NotSavedError(OSError):
    """A snapshot is not complete, because a rank could not write its part."""


@dataclass
class JointSave:
    """The messages of this rank's writing thread. `limit_s` limits how long rank 0 waits for the others."""

    store: StoreClient | None
    """None if rank 0 alone writes."""
    rank: int
    world_size: int
    limit_s: float
    token: str
    """A part of the names of directories that are being written; the same on all ranks."""
    _decided: str | None = None
    _given_up: threading.Event = field(default_factory=threading.Event)

    def give_up(self) -> None:
        """Stops waiting for parts, because a rank was lost. Can be called from any thread."""
        self._given_up.set()

    @property
    def is_given_up(self) -> bool:
        """Whether `give_up` was called."""
        return self._given_up.is_set()

    def exchange(self, step: int, own: dict[str, Any] | OSError) -> list[dict[str, Any]]:
        """Sends this rank's part, or its error. Returns the parts of all ranks on rank 0, and [] on others.

        Only rank 0 waits.

        Raises:
            NotSavedError: on rank 0, the error of the first rank that could not write its part, or the ranks
                that did not report in time.
            RendezvousError: the store has ended.
        """
        if self.rank:
            message = {"error": [own.errno, _text(own)]} if isinstance(own, OSError) else own
            self._set(f"part/{self.rank}", step, message)
            return []
        end_s, missing, error = time.monotonic() + self.limit_s, [], None
        parts: list[dict[str, Any]] = []
        for rank in range(self.world_size):
            try:
                part = self._take_part(rank, step, end_s) if rank else own
            except StoreTimeoutError:
                missing.append(str(rank))
                continue
            if isinstance(part, OSError):
                part = {"error": [part.errno, _text(part)]}
            if "error" in part:
                code, text = part["error"]
                where = f" (rank {rank})" if self.world_size > 1 else ""
                error = error or NotSavedError(code, f"{text}{where}")
            parts.append(part)
        if missing:
            names = ", ".join(missing[:8]) + (", ..." if len(missing) > 8 else "")
            ranks = (
                f"rank {names} did not write its"
                if len(missing) == 1
                else f"ranks {names} did not write their"
            )
            when = "before a rank was lost" if self.is_given_up else f"within {self.limit_s:g} s"
            error = error or NotSavedError(0, f"{ranks} part {when}")
        if error is not None:
            raise error
        return parts

    def decide(self, step: int, problem: str) -> None:
        """Tells the other ranks that the snapshot is complete, or the problem. Only rank 0 calls this."""
        if self.store is None:
            return
        # If all ranks have written their next parts, they have read the previous decision.
        if self._decided is not None and not problem:
            self.store.delete(self._decided, _ANSWER_S)
        self._decided = self._key("decision", step)
        self._set("decision", step, problem)

    def wait_for_decision(self, step: int) -> None:
        """Waits until rank 0 has completed the snapshot. The other ranks call this.

        Raises:
            NotSavedError: rank 0 has discarded the snapshot, or did not respond in time.
            RendezvousError: the store has ended.
        """
        # Rank 0 may still be writing its own part, and then waits for the slowest rank.
        limit_s = 2 * self.limit_s + _ANSWER_S
        assert self.store is not None
        try:
            [content] = self.store.get([self._key("decision", step)], limit_s)
        except StoreTimeoutError:
            raise NotSavedError(0, f"rank 0 did not complete the snapshot within {limit_s:g} s") from None
        if problem := _decoded(content):
            raise NotSavedError(0, problem)

    def _set(self, key: str, step: int, message: Any) -> None:
        assert self.store is not None
        self.store.set(self._key(key, step), zlib.compress(json.dumps(message).encode()), _ANSWER_S)

    def _take_part(self, rank: int, step: int, end_s: float) -> Any:
        key = self._key(f"part/{rank}", step)
        assert self.store is not None
        while not self.is_given_up and (left_s := end_s - time.monotonic()) > 0:
            with suppress(StoreTimeoutError):
                self.store.wait([key], min(left_s, _LOOK_S))
                break
        # After the limit, a rank that has already reported must not be taken for a missing one.
        if not self.store.check([key], _ANSWER_S):
            raise StoreTimeoutError(f"rank {rank} has not reported")
        [content] = self.store.get([key], _ANSWER_S)
        self.store.delete(key, _ANSWER_S)
        return _decoded(content)

    def _key(self, key: str, step: int) -> str:
        return f"snapshot/{self.token}/{step}/{key}"


def _decoded(content: bytes) -> Any:
    return json.loads(zlib.decompress(content))


def _text(error: OSError) -> str:
    return error.strerror or str(error)
