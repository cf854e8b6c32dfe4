"""Creates the store with which torch's process group connects the ranks.

gloo and MPI use the ranks' own authenticated store through Python. GPU backends use torch's TCPStore,
because their C++ watchdog threads access the store all the time and must not need the GIL. The server of
TCPStore is in the process of rank 0, and has no authentication.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

# torch re-exports these without naming them in an __all__.
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from ddp_hpc.discovery.rank_communication import GroupComm
from ddp_hpc.discovery.world import World
from ddp_hpc.rendezvous.connect_ranks import Endpoint
from ddp_hpc.rendezvous.listener import open_listener
from ddp_hpc.rendezvous.store_client import StoreClient, StoreLostError, StoreTimeoutError

__all__ = ["GroupStore", "PrefixStore", "Store", "TCPStore", "group_store"]

_WITH_RANKS_STORE = ("gloo", "mpi")


def group_store(endpoint: Endpoint, comm: GroupComm, world: World, backend: str, timeout_s: float) -> Store:
    """Returns a store for `init_process_group`. Collective: every rank must call this.

    The caller must keep a reference to it as long as the group exists, because C++ does not keep a Python
    object alive.

    Raises:
        RendezvousError: rank 0 cannot listen for the other ranks.
    """
    if backend in _WITH_RANKS_STORE:
        return GroupStore(endpoint.store, "group/", timeout_s)
    return PrefixStore("group", _tcp_store(endpoint, comm, world, timeout_s))


def _tcp_store(endpoint: Endpoint, comm: GroupComm, world: World, timeout_s: float) -> TCPStore:
    """Returns a client of a TCPStore server in rank 0's process. Collective: every rank must call this."""
    limit, port = timedelta(seconds=timeout_s), 0
    if world.rank == 0:
        # torch itself would listen on all addresses.
        listener = open_listener([0], endpoint.listen, world.world_size)
        port = listener.getsockname()[1]
        server = TCPStore(
            endpoint.host, port, world.world_size, is_master=True, timeout=limit, wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )  # fmt: skip
        comm.bcast(port)
        return server
    port = comm.bcast(port)
    return TCPStore(endpoint.host, port, is_master=False, timeout=limit, wait_for_workers=False)


class GroupStore(Store):
    """Adapts a `StoreClient` to the interface of torch's stores. Keys get a prefix.

    Raises:
        DistStoreError: from methods that wait, after the timeout.
        DistNetworkError: the connection to the store has ended.
    """

    def __init__(self, client: StoreClient, prefix: str, timeout_s: float) -> None:
        super().__init__()
        self._client, self._prefix = client, prefix
        self.set_timeout(timedelta(seconds=timeout_s))

    @property
    def _timeout_s(self) -> float:
        # The timeout is stored in C++, where torch can change it.
        timeout: timedelta = self.timeout  # type: ignore[attr-defined]  # missing from torch's stubs
        return timeout.total_seconds()

    def clone(self) -> GroupStore:
        """Returns the store itself, because threads can share its connection without blocking each other."""
        return self

    def set(self, key: str, value: str | bytes) -> None:
        """Stores a value."""
        with _torch_errors():
            self._client.set(self._prefix + key, _bytes(value), self._timeout_s)

    def get(self, key: str) -> bytes:
        """Waits for a key and returns its value."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Waits for all keys and returns their values."""
        with _torch_errors():
            return self._client.get([self._prefix + key for key in keys], self._timeout_s)

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Stores a value for each key."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def add(self, key: str, amount: int) -> int:
        """Adds to the number stored under a key, initially 0, and returns the sum."""
        with _torch_errors():
            return self._client.add(self._prefix + key, amount, self._timeout_s)

    def append(self, key: str, value: str | bytes) -> None:
        """Appends to the value of a key."""
        with _torch_errors():
            self._client.append(self._prefix + key, _bytes(value), self._timeout_s)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Replaces a value if it equals the expected one; returns the new value."""
        with _torch_errors():
            return self._client.compare_set(
                self._prefix + key, _bytes(expected), _bytes(desired), self._timeout_s
            )

    def check(self, keys: Sequence[str]) -> bool:
        """Returns whether all keys exist."""
        with _torch_errors():
            return self._client.check([self._prefix + key for key in keys], self._timeout_s)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Waits until all keys exist."""
        timeout_s = self._timeout_s if timeout is None else timeout.total_seconds()
        with _torch_errors():
            self._client.wait([self._prefix + key for key in keys], timeout_s)

    def has_extended_api(self) -> bool:
        """Returns whether the store supports `append`, `multi_get` and `multi_set`."""
        return True


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value


@contextmanager
def _torch_errors() -> Iterator[None]:
    """Converts errors to the types that torch and torchrun expect."""
    try:
        yield
    except StoreTimeoutError as error:
        raise dist.DistStoreError(str(error)) from None
    except StoreLostError as error:
        raise dist.DistNetworkError(str(error)) from None
