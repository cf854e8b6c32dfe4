"""The costs of exchanges between ranks grow slowly with the number of ranks: bytes, messages, connections."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from ddp_hpc.rendezvous.store_client import StoreClient
from ddp_hpc.rendezvous.store_comm import StoreComm
from tests.stores import Served, store_in_thread

FEW, MANY = 8, 32


@pytest.fixture
def store() -> Iterator[Served]:
    with store_in_thread() as served:
        yield served


def received_bytes(client: StoreClient) -> Callable[[], int]:
    """Counts what a client receives from now on; returns the counter."""
    pieces: list[int] = []
    decode = client._stream.messages

    def messages(received: bytes) -> Any:
        pieces.append(len(received))
        return decode(received)

    client._stream.messages = messages  # type: ignore[method-assign]
    return lambda: sum(pieces)


def bytes_of_last_rank(store: Served, size: int, body: Callable[[StoreComm], object]) -> int:
    """Runs the body on all ranks; returns the number of bytes that the last rank received."""
    clients = [store.client() for _ in range(size)]
    count = received_bytes(clients[-1])
    with ThreadPoolExecutor(size) as pool:
        list(pool.map(lambda rank: body(StoreComm(clients[rank], rank, size, 20.0)), range(size)))
    for client in clients:
        client.set("end", b"", 5.0)
    return count()


@pytest.mark.parametrize(
    "body",
    [
        lambda comm: comm.barrier("the data"),
        lambda comm: comm.combine("", max),
        lambda comm: comm.gather("the placement", "x" * 100),
        lambda comm: comm.members(f"n{comm.rank // 4:02}", "x" * 100),
    ],
    ids=["barrier", "combine", "gather", "members"],
)
def test_what_a_rank_receives_does_not_depend_on_the_number_of_ranks(
    body: Callable[[StoreComm], object],
) -> None:
    sizes = []
    for size in (FEW, MANY):
        with store_in_thread() as served:
            sizes.append(bytes_of_last_rank(served, size, body))
    # The number of nodes in the answer of `members` has more digits for more nodes.
    assert sizes[1] <= sizes[0] + 2


def test_members_are_the_ranks_of_the_same_group_in_rank_order(store: Served) -> None:
    clients = [store.client() for _ in range(5)]
    groups = ["b", "a", "b", "c", "a"]

    def body(rank: int) -> tuple[list[int], int, int]:
        found = StoreComm(clients[rank], rank, 5, 20.0).members(groups[rank], rank)
        return found.values, found.index, found.num_groups

    with ThreadPoolExecutor(5) as pool:
        found = list(pool.map(body, range(5)))
    assert found == [([0, 2], 0, 3), ([1, 4], 1, 3), ([0, 2], 0, 3), ([3], 2, 3), ([1, 4], 1, 3)]
