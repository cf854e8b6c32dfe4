"""The collectives of `ddp-hpc bench comm`, each with its call and its expected result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_hpc.bench.comm.verification_data import fill_pattern, sum_table, table

# torch 2.13 renamed these two functions, and prints a warning for the old names.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_NEVER_SENT = -1


@dataclass(frozen=True)
class Members:
    """The ranks that call a collective, and the position of this rank among them."""

    size: int
    per_node: int | None
    """Number of ranks per node; None if it differs between nodes."""
    index: int
    device: torch.device

    def synchronize(self) -> None:
        """Waits until the device has finished all work."""
        if self.device.type != "cpu":
            torch.get_device_module(self.device).synchronize(self.device)


@dataclass(frozen=True)
class Operation:
    """One collective on preallocated buffers, so that `run` allocates no tensors."""

    run: Callable[[], object]
    sent: Tensor
    received: Tensor  # may be the same tensor as `sent`
    first: Callable[[], Tensor] | None  # the values of `sent` before the call; None: this rank sends nothing
    last: Callable[[], Tensor] | None  # the expected values of `received`; None: undefined on this rank

    def find_wrong(self, members: Members) -> str:
        """Runs the collective once with known values; describes errors in this rank's result, or returns "".

        Collective: every member must call this.
        """
        self.received.fill_(_NEVER_SENT)
        if self.first is not None:
            self.sent.copy_(self.first())
        self.run()
        members.synchronize()
        if self.last is None:
            return ""
        expected = self.last()
        wrong = self.received != expected
        num_wrong = int(wrong.sum())
        if not num_wrong:
            return ""
        at = int(wrong.byte().argmax())
        return (
            f"{num_wrong:,} of {wrong.numel():,} elements wrong, the first at {at}: "
            f"{self.received[at].item():g} instead of {expected[at].item():g}"
        )


def _empty(members: Members, count: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(count, dtype=dtype, device=members.device)


def _all_reduce(members: Members, count: int, dtype: torch.dtype) -> Operation:
    buffer, num = _empty(members, count, dtype), members.size
    return Operation(
        run=lambda: dist.all_reduce(buffer),
        sent=buffer,
        received=buffer,
        first=lambda: fill_pattern(table(members.index, num, dtype), 0, count, buffer),
        last=lambda: fill_pattern(sum_table(num, dtype), 0, count, buffer),
    )


def _reduce(members: Members, count: int, dtype: torch.dtype) -> Operation:
    like = _all_reduce(members, count, dtype)
    return replace(
        like,
        run=lambda: dist.reduce(like.sent, dst=0),
        last=None if members.index else like.last,
    )


def _broadcast(members: Members, count: int, dtype: torch.dtype) -> Operation:
    buffer = _empty(members, count, dtype)

    def roots() -> Tensor:
        return fill_pattern(table(0, 1, dtype), 0, count, buffer)

    return Operation(
        run=lambda: dist.broadcast(buffer, src=0),
        sent=buffer,
        received=buffer,
        first=None if members.index else roots,
        last=roots,
    )


def _all_gather_single(members: Members, count: int, dtype: torch.dtype) -> Operation:
    part = count // members.size
    sent, received = _empty(members, part, dtype), _empty(members, count, dtype)
    return Operation(
        run=lambda: _all_gather(received, sent),
        sent=sent,
        received=received,
        first=lambda: fill_pattern(table(members.index, 1, dtype), 0, part, sent),
        last=lambda: torch.cat(
            [fill_pattern(table(index, 1, dtype), 0, part, sent) for index in range(members.size)]
        ),
    )


def _reduce_scatter_single(members: Members, count: int, dtype: torch.dtype) -> Operation:
    num, part = members.size, count // members.size
    sent, received = _empty(members, count, dtype), _empty(members, part, dtype)
    return Operation(
        run=lambda: _reduce_scatter(received, sent),
        sent=sent,
        received=received,
        first=lambda: fill_pattern(table(members.index, num, dtype), 0, count, sent),
        last=lambda: fill_pattern(sum_table(num, dtype), members.index * part, part, sent),
    )


def _all_to_all(members: Members, count: int, dtype: torch.dtype) -> Operation:
    part = count // members.size
    sent, received = _empty(members, count, dtype), _empty(members, count, dtype)
    return Operation(
        run=lambda: dist.all_to_all_single(received, sent),
        sent=sent,
        received=received,
        first=lambda: fill_pattern(table(members.index, 1, dtype), 0, count, sent),
        last=lambda: torch.cat(
            [
                fill_pattern(table(index, 1, dtype), members.index * part, part, sent)
                for index in range(members.size)
            ]
        ),
    )


def _send_recv(members: Members, count: int, dtype: torch.dtype) -> Operation:
    sent, received = _empty(members, count, dtype), _empty(members, count, dtype)
    before, after = ((members.index + step) % members.size for step in (-1, 1))
    ring = [dist.P2POp(dist.isend, sent, after), dist.P2POp(dist.irecv, received, before)]

    def run() -> None:
        for work in dist.batch_isend_irecv(ring):
            work.wait()

    return Operation(
        run=run,
        sent=sent,
        received=received,
        first=lambda: fill_pattern(table(members.index, 1, dtype), 0, count, sent),
        last=lambda: fill_pattern(table(before, 1, dtype), 0, count, sent),
    )


MAKERS: dict[str, Callable[[Members, int, torch.dtype], Operation]] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather_single,
    "reduce_scatter": _reduce_scatter_single,
    "all_to_all": _all_to_all,
    "send_recv": _send_recv,
}
"""Functions that create the operation of a collective for a total number of elements, by name."""
