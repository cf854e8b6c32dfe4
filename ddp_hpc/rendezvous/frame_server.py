"""The connections of the ranks' store: their handshake with the job's key, and their frames."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ddp_hpc.rendezvous.store_protocol import (
    RESPONSE_BYTES,
    FrameStream,
    ProtocolError,
    Status,
    challenge,
    is_response,
    server_proof,
    stream_keys,
)

MAX_UNREAD_BYTES = 256 * 2**20
MIN_UNAUTHENTICATED = 512
"""The number of handshakes that may be incomplete at the same time, unless more clients are expected."""
HANDSHAKE_S = 10.0
LINGER_S = 10.0
"""Maximum time in seconds between the end of the owner and the end of the server."""
_PIECE_BYTES = 1 << 18


@dataclass(eq=False)
class Connection:
    """A client, or an unauthenticated connection until its proof has been received."""

    socket: socket.socket
    address: str
    nonce: bytes
    opened_s: float
    received: bytearray = field(default_factory=bytearray)  # received bytes of the handshake
    stream: FrameStream | None = None
    unsent: deque[bytes] = field(default_factory=deque)
    unsent_bytes: int = 0
    requests: dict[int, Any] = field(default_factory=dict)  # unanswered requests, by number


def warn(text: str) -> None:
    """Prints a warning with the name of this host."""
    with contextlib.suppress(OSError):
        os.write(2, f"[{socket.gethostname().partition('.')[0]}] warning: {text}\n".encode())


def _do_nothing() -> None:
    pass


@dataclass(frozen=True)
class Owner:
    """The process that has started a server, and callbacks for warnings and for the end of this process."""

    pid: int
    """The process ID of the owner, which is the parent of the server's process."""
    pipe: int
    """A file descriptor that returns end of file when the owner has ended.

    The end is also detected by the process ID, up to a second later, because the owner's children may keep
    the pipe open.
    """
    warn: Callable[[str], None] = warn
    """Called with a line about rejected connections: the 1st, the 10th, the 100th, ..."""
    on_end: Callable[[], None] = _do_nothing
    """Called when the owner has ended."""


class FrameServer:
    """Serves clients on a listening socket until its owner has ended.

    Args:
        listener: the listening socket, which is closed at the end.
        key: the key that clients must have.
        owner: the process that has started the server.
        num_clients: the number of clients that may connect at once.
    """

    def __init__(self, listener: socket.socket, key: bytes, owner: Owner, *, num_clients: int = 0) -> None:
        self._listener, self._key, self._owner = listener, key, owner
        self._max_unauthenticated = max(MIN_UNAUTHENTICATED, num_clients)
        self._connections: set[Connection] = set()
        self._unauthenticated: dict[Connection, None] = {}  # in the order of their arrival
        self._num_refused = 0
        self._owner_ended_s: float | None = None
        self._selector = selectors.DefaultSelector()
        self._listener.setblocking(False)

    def serve(self) -> None:
        """Serves until the owner has ended and all clients have disconnected, or `LINGER_S` after its end."""
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._owner.pipe, selectors.EVENT_READ)
        try:
            while not self._is_finished():
                for event, mask in self._selector.select(1.0):
                    if event.fileobj is self._listener:
                        self._accept()
                    elif event.fileobj == self._owner.pipe:
                        self._handle_owner_end()
                    elif event.data in self._connections:
                        if mask & selectors.EVENT_WRITE:
                            self._send(event.data)
                        if mask & selectors.EVENT_READ:
                            self._receive(event.data)
                self._close_slow_handshakes()
                if os.getppid() != self._owner.pid:
                    self._handle_owner_end()
        finally:
            for connection in list(self._connections):
                self._close(connection)
            self._listener.close()  # has no effect if `_handle_owner_end` has already closed it
            self._selector.close()

    # Methods that subclasses override.

    def _handle(self, connection: Connection, op: int, request: int, fields: list[bytes]) -> None:
        """Handles a request, to which `_reply` sends the answer now or later.

        Raises:
            ProtocolError, ValueError: the request is invalid; the connection is closed.
        """
        raise NotImplementedError

    def _handle_end(self, connection: Connection) -> None:
        """Handles the end of a connection, which has been removed from `_connections`."""

    def _handle_owner_end(self) -> None:
        """Handles the end of the owner, which may be detected more than once."""
        if self._owner_ended_s is not None:
            return
        self._owner_ended_s = time.monotonic()
        # The next attempt of the job may use the port, and its ranks must not connect to this server.
        self._selector.unregister(self._listener)
        self._listener.close()
        self._selector.unregister(self._owner.pipe)
        self._owner.on_end()

    def _is_finished(self) -> bool:
        if self._owner_ended_s is None:
            return False
        has_clients = len(self._connections) > len(self._unauthenticated)
        return not has_clients or time.monotonic() > self._owner_ended_s + LINGER_S

    # Methods that manage connections.

    def _accept(self) -> None:
        try:
            accepted, address = self._listener.accept()
        except BlockingIOError:
            return
        except OSError:
            # There may be no free file descriptor, so close the oldest unauthenticated connection.
            if self._unauthenticated:
                self._refuse_oldest()
            else:
                time.sleep(0.01)
            return
        accepted.setblocking(False)
        with contextlib.suppress(OSError):
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            accepted.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection = Connection(accepted, str(address[0]), os.urandom(32), time.monotonic())
        self._unauthenticated[connection] = None
        self._connections.add(connection)
        self._selector.register(accepted, selectors.EVENT_READ, connection)
        self._queue(connection, challenge(connection.nonce))
        if len(self._unauthenticated) > self._max_unauthenticated:
            self._refuse_oldest()

    def _receive(self, connection: Connection) -> None:
        limit = _PIECE_BYTES if connection.stream else RESPONSE_BYTES - len(connection.received)
        try:
            received = connection.socket.recv(limit)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        if not received:
            # If no data was received, there is no warning: the peer may only have checked that the port is
            # open.
            if connection.stream or not connection.received:
                self._close(connection)
            else:
                self._refuse(connection)
            return
        try:
            if connection.stream is None:
                self._shake_hands(connection, received)
                return
            for op, request, fields in connection.stream.messages(received):
                self._handle(connection, op, request, fields)
        except (ProtocolError, ValueError):
            self._refuse(connection)

    def _shake_hands(self, connection: Connection, received: bytes) -> None:
        connection.received += received
        if len(connection.received) < RESPONSE_BYTES:
            return
        proof = bytes(connection.received)
        if not is_response(self._key, connection.nonce, proof):
            raise ProtocolError("the client does not have the key")
        nonces = connection.nonce, proof[:32]
        client_key, server_key = stream_keys(self._key, *nonces)
        self._queue(connection, server_proof(self._key, *nonces))
        connection.stream = FrameStream(sending_key=server_key, receiving_key=client_key)
        del self._unauthenticated[connection]

    def _close_slow_handshakes(self) -> None:
        latest_s = time.monotonic() - HANDSHAKE_S
        while self._unauthenticated and next(iter(self._unauthenticated)).opened_s < latest_s:
            self._refuse_oldest()

    def _refuse_oldest(self) -> None:
        """Closes the oldest unauthenticated connection, unless its proof has arrived in the meantime."""
        oldest = next(iter(self._unauthenticated))
        self._receive(oldest)
        if oldest in self._unauthenticated:
            self._refuse(oldest)

    def _refuse(self, connection: Connection) -> None:
        self._close(connection)
        self._num_refused += 1
        count = self._num_refused
        if count == 10 ** (len(str(count)) - 1):  # the 1st, 10th, 100th, ... connection
            number = f" ({count} so far)" if count > 1 else ""
            self._owner.warn(
                f"rejected a connection from {connection.address} without this job's key{number}; possible "
                "causes are a port scan, another job, a rank that was too slow and tries again, or an attack"
            )

    def _close(self, connection: Connection) -> None:
        self._connections.discard(connection)
        self._unauthenticated.pop(connection, None)
        self._selector.unregister(connection.socket)
        connection.socket.close()
        self._handle_end(connection)

    def _queue(self, connection: Connection, data: bytes) -> None:
        connection.unsent.append(data)
        connection.unsent_bytes += len(data)
        self._send(connection)

    def _send(self, connection: Connection) -> None:
        try:
            while connection.unsent:
                data = connection.unsent[0]
                sent = connection.socket.send(data)
                connection.unsent_bytes -= sent
                if sent < len(data):
                    connection.unsent[0] = data[sent:]
                    break
                connection.unsent.popleft()
        except BlockingIOError:
            pass
        except OSError:
            connection.unsent.clear()  # the next recv() reports the end of the connection
            return
        if connection.unsent_bytes > MAX_UNREAD_BYTES:
            with contextlib.suppress(OSError):  # the client may have disconnected in the meantime
                connection.socket.shutdown(socket.SHUT_RDWR)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent else 0)
        if self._selector.get_key(connection.socket).events != events:
            self._selector.modify(connection.socket, events, connection)

    def _reply(self, connection: Connection, status: int, request: int, fields: list[bytes]) -> None:
        if connection.stream is not None and connection in self._connections:
            try:
                frame = connection.stream.frame(status, request, fields)
            except ValueError as error:  # larger than the limit of a frame
                frame = connection.stream.frame(Status.REFUSED, request, [str(error).encode()])
            self._queue(connection, frame)
