"""A server for the TCPStore clients of one node, which keeps their values in the ranks' store.

NCCL and other GPU backends access their store from C++ threads that must not wait for Python's GIL, so they
need clients of torch's own TCPStore. torch's own server would run in rank 0's process, have a connection to
each rank, and have no authentication. Instead, each node runs this server in a separate process. It listens
on the loopback address, serves only processes of the same user, and forwards their queries to the ranks'
store over one connection, which is authenticated with the job's key. Clients can connect at any time, because
torch connects again whenever it splits a process group (`TCPStore::clone`).
"""

from __future__ import annotations

import os
import selectors
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from queue import SimpleQueue
from typing import ClassVar

from ddp_hpc.base.errors import RendezvousError
from ddp_hpc.discovery.peer_users import open_diagnosis, users_of_peers
from ddp_hpc.rendezvous.frame_server import (
    Connection,
    FrameServer,
    Owner,
    close_output,
    read_key_of_owner,
)
from ddp_hpc.rendezvous.store_client import (
    Answer,
    StoreClient,
    StoreLostError,
    connect,
)
from ddp_hpc.rendezvous.store_protocol import Op, Status, batched_pairs
from ddp_hpc.rendezvous.torch_store_protocol import QUERY_NAMES, Query, TorchStream

_PREFIX, _BARRIER = b"torch/", b"torch-barrier/"
_CONNECT_S = 20.0
_MAX_ABSENT = 1000
_MAX_ACCEPTED = 1024  # connections that are accepted before the queries of the clients are served again
OWN_STORE = "DDP_HPC_TORCH_STORE"
"""The environment variable with which torch's own TCPStore is used instead of this server."""
_READS = {
    Query.GET: Op.READ,
    Query.MULTI_GET: Op.READ,
    Query.CHECK: Op.CHECK,
    Query.WAIT: Op.WAIT,
    Query.DELETE_KEY: Op.DELETE,
}
_CHANGES = {
    Query.SET: Op.SET,
    Query.COMPARE_SET: Op.COMPARE_SET,
    Query.ADD: Op.ADD,
    Query.APPEND: Op.APPEND,
}


class TorchStoreServer(FrameServer):
    """Serves the TCPStore clients of this node on a listening socket until the owner has ended.

    If the ranks' store rejects a query, the server closes the connection, as torch's server does. Queues
    (`Store.queue_push`) are not supported.
    """

    _REFUSED: ClassVar = (
        "that is not from a torch client of this user",
        "a port scan or another user's program",
    )

    def __init__(self, listener: socket.socket, store: StoreClient, owner: Owner, torch_version: str) -> None:
        super().__init__(listener, b"", owner)
        self._store, self._is_lost, self._torch_version = store, False, torch_version
        self._diagnosis = open_diagnosis(listener)
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._waker, woken = socket.socketpair()
        for end in (self._waker, woken):
            end.setblocking(False)
        self._selector.register(woken, selectors.EVENT_READ, lambda: self._make_calls(woken))
        # Keys that do not exist yet; the ranks' store will notify this server when they are created. On each
        # rank, NCCL's monitoring thread checks every second whether any rank has set the key that requests a
        # debug dump. Without this set of keys, all of these checks would be sent to rank 0.
        self._absent: set[bytes] = set()
        self._num_changes = 0  # the number of forwarded changes of any key

    def _accept(self) -> None:
        """Accepts all waiting connections, but keeps only those of this user, so that others delay nobody."""
        waiting = list(islice(iter(self._accept_one, None), _MAX_ACCEPTED))
        users = users_of_peers([accepted for accepted, _ in waiting], self._diagnosis)
        for (accepted, host), user in zip(waiting, users, strict=True):
            if user == os.geteuid():
                self._add(Connection(accepted, host, stream=TorchStream()))
            else:
                accepted.close()
                self._count_refused(host)

    def _is_finished(self) -> bool:
        return self._is_lost or super()._is_finished()

    def _handle_end(self, connection: Connection) -> None:
        self._cancel(connection)

    def _handle(self, connection: Connection, op: int, request: int, fields: list[bytes]) -> None:
        match op, fields:
            case Query.PING, _:
                self._reply(connection, Status.DONE, request, fields)
            case Query.CANCEL_WAIT, _:
                self._cancel(connection)
                self._reply(connection, Status.DONE, request, [])
            case Query.CHECK, [key] if key in self._absent:
                self._reply(connection, Status.DONE, request, [b"0"])
            case ((Query.GETNUMKEYS | Query.LIST_KEYS), _):
                self._ask(connection, request, Op.LIST, [], lambda keys: _listed(op, keys))
            case Query.CHECK, [key]:
                self._check(connection, request, key)
            case Query.MULTI_SET, _:
                for key, value in batched_pairs(fields):
                    self._change(connection, request, Op.SET, [key, value])
            case Query.BARRIER, [key, size]:
                self._arrive(connection, request, key, int(size))
            case _ if op in _READS:
                self._ask(connection, request, _READS[Query(op)], [_PREFIX + key for key in fields])
            case _ if op in _CHANGES:
                self._change(connection, request, _CHANGES[Query(op)], fields)
            case _:
                self._owner.warn(
                    f"closed the connection to a torch client on this node: torch {self._torch_version} has "
                    f"sent the query {QUERY_NAMES.get(op, op)}, which is not supported; set {OWN_STORE}=1 to "
                    "use torch's own store, which has no authentication"
                )
                self._close(connection)

    def _change(self, connection: Connection, request: int, op: Op, fields: list[bytes]) -> None:
        key, *values = fields
        self._absent.discard(key)
        self._num_changes += 1
        self._ask(connection, request, op, [_PREFIX + key, *values])

    def _check(self, connection: Connection, request: int, key: bytes) -> None:
        num_changes = self._num_changes

        def checked(exists: list[bytes]) -> list[bytes]:
            # A client of this node may have created the key in the meantime, and must see it at once.
            is_absent = exists != [b"1"] and num_changes == self._num_changes
            if is_absent and key not in self._absent and len(self._absent) < _MAX_ABSENT:
                self._absent.add(key)
                self._request(Op.GET, [_PREFIX + key], lambda _: self._absent.discard(key))
            return exists

        self._ask(connection, request, Op.CHECK, [_PREFIX + key], checked)

    def _arrive(self, connection: Connection, request: int, key: bytes, size: int) -> None:
        """Answers once `size` clients have arrived at a barrier."""

        def counted(total: list[bytes]) -> None:
            op, value = (Op.SET, [b"1"]) if int(total[0]) >= size else (Op.WAIT, list[bytes]())
            self._ask(connection, request, op, [_BARRIER + key, *value])

        self._ask(connection, request, Op.ADD, [_PREFIX + key, b"1"], counted)

    def _ask(
        self,
        connection: Connection,
        request: int,
        op: Op,
        fields: list[bytes],
        answer: Callable[[list[bytes]], list[bytes] | None] = list,
    ) -> None:
        """Sends a request to the ranks' store.

        `answer` converts the result to the answer for the client, or returns None if a later request to the
        ranks' store will provide the answer.
        """

        def done(result: list[bytes]) -> None:
            is_awaited = connection.requests.pop(request, None) is not None
            if is_awaited and (converted := answer(result)) is not None:
                self._reply(connection, Status.DONE, request, converted)

        connection.requests[request] = self._request(op, fields, done, connection)

    def _request(
        self,
        op: Op,
        fields: list[bytes],
        done: Callable[[list[bytes]], None],
        connection: Connection | None = None,
    ) -> int:
        def deliver(answer: Answer) -> None:
            if not isinstance(answer, RendezvousError):
                done(answer)
            elif self._store.is_lost:
                self._is_lost = True
            elif connection is not None and connection in self._connections:
                self._owner.warn(f"closed the connection to a torch client on this node: {answer}")
                self._close(connection)

        try:
            # The background thread of the connection to the store calls this lambda.
            return self._store.send(op, fields, lambda answer: self._call_soon(lambda: deliver(answer)))
        except StoreLostError:
            self._is_lost = True
            return 0

    def _call_soon(self, call: Callable[[], None]) -> None:
        self._calls.put(call)
        with suppress(BlockingIOError):  # the server has been woken already
            self._waker.send(b"!")

    def _make_calls(self, woken: socket.socket) -> None:
        woken.recv(4096)
        while not self._calls.empty():
            self._calls.get()()

    def _cancel(self, connection: Connection) -> None:
        for number in connection.requests.values():
            self._store.cancel(number)
        connection.requests.clear()


def _listed(query: int, keys: list[bytes]) -> list[bytes]:
    own = [key.removeprefix(_PREFIX) for key in keys if key.startswith(_PREFIX)]
    return own if query == Query.LIST_KEYS else [b"%d" % len(own)]


def main() -> None:
    """Runs the server. `TorchStoreProcess` passes LISTENER TORCH HOST PORT, and the key on stdin."""
    owner = Owner(os.getppid(), pipe=0, on_end=close_output)
    if not (key := read_key_of_owner()):
        return
    listener, torch_version, host, port = sys.argv[1:5]
    with socket.socket(fileno=int(listener)) as accepting:
        try:
            store = connect(host, [int(port)], lambda: key, _CONNECT_S)
        except RendezvousError as error:
            if os.getppid() == owner.pid:
                owner.warn(f"torch's store on this node cannot connect to the ranks' store: {error}")
            return
        TorchStoreServer(accepting, store, owner, torch_version).serve()
        store.close()
