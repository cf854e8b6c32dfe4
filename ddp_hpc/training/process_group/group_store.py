"""Creates the store of torch's process group, which keeps its values in the ranks' own authenticated store.

torch's own TCPStore has no authentication, and needs a connection from each rank to rank 0. gloo accesses the
ranks' store through Python. GPU backends use TCPStore clients, because their C++ watchdog threads access the
store all the time and must not need the GIL. A process on each node serves these clients
(`torch_store_server`); this has not been tested with NCCL on a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

# torch re-exports these without naming them in an __all__.
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from ddp_hpc.base.errors import RendezvousError
from ddp_hpc.discovery.rank_communication import GroupComm
from ddp_hpc.discovery.world import World
from ddp_hpc.rendezvous.address import LOOPBACK
from ddp_hpc.rendezvous.connect_ranks import Endpoint
from ddp_hpc.rendezvous.listener import open_listener
from ddp_hpc.rendezvous.store_client import StoreClient, StoreLostError, StoreTimeoutError
from ddp_hpc.rendezvous.store_process import ServerProcess, TorchStoreProcess
from ddp_hpc.rendezvous.torch_store_server import OWN_STORE

__all__ = ["GroupStore", "OpenStore", "PrefixStore", "Store", "TCPStore", "group_store"]

_OWN_STORE_BACKENDS = ("gloo", "mpi")


@dataclass(frozen=True)
class OpenStore:
    """A store for `init_process_group`.

    The caller must keep a reference to it as long as the group exists, because C++ does not keep a Python
    object alive.
    """

    store: Store
    server: ServerProcess | None = None  # on one rank per node, if the backend needs it
    note: str = ""  # for the log

    def close(self) -> None:
        """Ends the server of this rank once its clients have disconnected. Not collective; never raises."""
        if self.server is not None:
            self.server.close()


def group_store(
    endpoint: Endpoint, comm: GroupComm, world: World, backend: str, timeout_s: float
) -> OpenStore:
    """Returns a store for `init_process_group`. Collective: every rank must call this.

    If DDP_HPC_TORCH_STORE is 1 on rank 0, this is torch's own TCPStore.

    Raises:
        RendezvousError: the server for torch's TCPStore clients cannot be started on this node.
    """
    if comm.bcast(os.environ.get(OWN_STORE, "") == "1"):
        return _torchs_own_store(endpoint, comm, world, timeout_s)
    if backend in _OWN_STORE_BACKENDS:
        return OpenStore(GroupStore(endpoint.store, "group/", timeout_s))
    port, problem, server = 0, "", None
    if world.local_rank == 0:
        try:
            listener = open_listener([0], LOOPBACK)
            port = listener.getsockname()[1]
            server = TorchStoreProcess(listener, endpoint.store, torch.__version__)
        except RendezvousError as error:
            port, problem = 0, str(error)
    of_node = comm.members(world.hostname, (port, problem)).values
    port = max(port for port, _ in of_node)
    if not port:
        problem = next((problem for _, problem in of_node if problem), "no rank of the node has local rank 0")
        raise RendezvousError(f"torch's store on {world.hostname} cannot be started: {problem}")
    store = TCPStore(
        LOOPBACK, port, is_master=False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False
    )
    return OpenStore(PrefixStore("group", store), server)


def _torchs_own_store(endpoint: Endpoint, comm: GroupComm, world: World, timeout_s: float) -> OpenStore:
    """Returns a client of a TCPStore server in rank 0's process. Collective: every rank must call this."""
    limit, server = timedelta(seconds=timeout_s), None
    if world.rank == 0:
        listener = open_listener([0], endpoint.listen)
        port = listener.getsockname()[1]
        server = TCPStore(
            endpoint.host, port, world.world_size, is_master=True, timeout=limit, wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )  # fmt: skip
    port = comm.bcast(0 if server is None else server.port)
    store = server or TCPStore(endpoint.host, port, is_master=False, timeout=limit, wait_for_workers=False)
    note = f"{OWN_STORE}=1: the ranks use torch's own TCPStore on port {port}, which has no authentication"
    return OpenStore(PrefixStore("group", store), note=note)


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
