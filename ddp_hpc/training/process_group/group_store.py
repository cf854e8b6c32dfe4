"""Creates the store of torch's process group: the ranks' own authenticated store, or torch's TCPStore.

torch's TCPStore has no authentication. gloo uses the ranks' own store instead, so that nobody else can read
or replace the messages. GPU backends use torch's store, because their C++ watchdog threads access it all the
time and must not need the GIL; its port is open only until all ranks have connected. Neither store has been
tested with NCCL on a GPU.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

# torch re-exports these without naming them in an __all__.
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from ddp_hpc.discovery.rank_communication import Comm
from ddp_hpc.rendezvous.connect_ranks import Endpoint
from ddp_hpc.rendezvous.listener import open_listener
from ddp_hpc.rendezvous.store_client import StoreClient, StoreLostError, StoreTimeoutError

__all__ = ["GroupStore", "PrefixStore", "Store", "TCPStore", "group_store"]

_OWN_STORE_BACKENDS = ("gloo", "mpi")


def group_store(endpoint: Endpoint, comm: Comm, backend: str, timeout_s: float) -> Store:
    """Returns a store for `init_process_group`. Collective: every rank must call this.

    The caller must keep a reference to it as long as the group exists: C++ does not keep the Python object
    alive.
    """
    if backend in _OWN_STORE_BACKENDS:
        return GroupStore(endpoint.store, "group/", timeout_s)
    return _torch_store(endpoint, comm, timeout_s)


def _torch_store(endpoint: Endpoint, comm: Comm, timeout_s: float) -> Store:
    """Returns torch's store, whose port accepts no connections once all ranks have connected. Collective."""
    descriptor, port = -1, 0
    if comm.rank == 0:
        listener = open_listener([0], endpoint.listen, comm.size)
        port = listener.getsockname()[1]
        descriptor = listener.detach()
    port = comm.bcast(port)
    store = TCPStore(
        endpoint.host,
        port,
        None,
        is_master=comm.rank == 0,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=descriptor if comm.rank == 0 else None,
    )
    comm.barrier("torch's store")
    if comm.rank == 0:
        # The store owns and closes the descriptor, so it is replaced by a socket that nobody can connect to.
        with socket.socket(socket.AF_UNIX) as unreachable:
            os.dup2(unreachable.fileno(), descriptor, inheritable=False)
    return PrefixStore("group", store)


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

    def delete_key(self, key: str) -> bool:
        """Removes a key; returns whether it existed."""
        with _torch_errors():
            return self._client.delete(self._prefix + key, self._timeout_s)

    def num_keys(self) -> int:
        """Returns the number of keys."""
        return len(self.list_keys())

    def list_keys(self) -> list[str]:
        """Returns all keys."""
        with _torch_errors():
            keys = self._client.keys(self._timeout_s)
        return [key.removeprefix(self._prefix) for key in keys if key.startswith(self._prefix)]

    def has_extended_api(self) -> bool:
        """Returns whether the store supports `append`, `multi_get` and `multi_set`."""
        return True

    # C++ looks for these two methods under these names (torch 2.13).
    deleteKey, getNumKeys = delete_key, num_keys  # noqa: N815


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
