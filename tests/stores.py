"""The ranks' store for tests: its server in a process, as on rank 0, or in a thread of the test."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from ddp_hpc.rendezvous.frame_server import Owner
from ddp_hpc.rendezvous.store_client import StoreClient, connect
from ddp_hpc.rendezvous.store_process import StoreProcess
from ddp_hpc.rendezvous.store_server import StoreServer

HERE = "127.0.0.1"


def closed_port() -> int:
    with socket.create_server((HERE, 0)) as server:
        port: int = server.getsockname()[1]
    return port


@dataclass
class Served:
    """A store that is served; `client` connects to it."""

    port: int
    key: bytes
    process: StoreProcess | None = None
    warnings: list[str] = field(default_factory=list)
    owner_pipe: int = -1
    clients: list[StoreClient] = field(default_factory=list)
    server: StoreServer | None = None

    def client(self) -> StoreClient:
        client = connect(HERE, [self.port], lambda: self.key, 10.0)
        self.clients.append(client)
        return client

    def end_owner(self) -> None:
        os.close(self.owner_pipe)
        self.owner_pipe = -1


@contextmanager
def store_in_process(num_clients: int = 0) -> Iterator[Served]:
    listener, key = socket.create_server((HERE, 0), backlog=4096), os.urandom(32)
    served = Served(listener.getsockname()[1], key)
    served.process = StoreProcess(listener, key, num_clients)
    try:
        yield served
    finally:
        _close(served)
        served.process.close()


def _close(served: Served) -> None:
    for client in served.clients:
        client.close()


@contextmanager
def store_in_thread(max_bytes: int = 2**30) -> Iterator[Served]:
    listener, key = socket.create_server((HERE, 0), backlog=4096), os.urandom(32)
    served = Served(listener.getsockname()[1], key)
    reader, served.owner_pipe = os.pipe()
    server = StoreServer(
        listener,
        key,
        Owner(os.getppid(), pipe=reader, warn=served.warnings.append),
        max_bytes=max_bytes,
    )
    served.server = server
    thread = threading.Thread(target=server.serve, daemon=True)
    thread.start()
    try:
        yield served
    finally:
        _close(served)
        if served.owner_pipe >= 0:
            served.end_owner()
        thread.join(15)
        os.close(reader)
        assert not thread.is_alive()
