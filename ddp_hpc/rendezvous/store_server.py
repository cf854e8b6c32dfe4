"""The server of the ranks' key-value store: a separate process on rank 0's node, without torch.

It serves only clients that have the job's key (`store_protocol`). As a separate process it answers
even while rank 0 computes, is stopped or holds the GIL. It runs for a few seconds after the end of
rank 0, so that the other ranks can read what happened.

The requests and their results are those of torch's TCPStore, including `compare_set` of a missing
key: https://docs.pytorch.org/docs/stable/distributed.html#distributed-key-value-store
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from ddp_hpc.rendezvous.store_protocol import (
    KEY_BYTES,
    RESPONSE_BYTES,
    FrameReader,
    FrameWriter,
    Op,
    ProtocolError,
    Status,
    batched_pairs,
    challenge,
    is_response,
    server_proof,
    stream_keys,
)

MAX_STORE_BYTES = 2**30
MAX_UNREAD_BYTES = 256 * 2**20
MAX_UNAUTHENTICATED = 512
HANDSHAKE_S = 10.0
LINGER_S = 10.0
"""Maximum time in seconds between the end of rank 0 and the end of the server."""
_PIECE_BYTES = 1 << 18
_PER_ENTRY_BYTES = 100  # the approximate overhead of Python for a key and a value


@dataclass(eq=False)
class _Connection:
    """A client, or an unauthenticated connection until its proof has been received."""

    socket: socket.socket
    address: str
    nonce: bytes
    opened_s: float
    received: bytearray = field(default_factory=bytearray)  # received bytes of the handshake
    reader: FrameReader | None = None
    writer: FrameWriter | None = None
    unsent: deque[bytes] = field(default_factory=deque)
    unsent_bytes: int = 0
    waits: dict[int, _Wait] = field(default_factory=dict)


@dataclass(eq=False)
class _Wait:
    """A request that is answered once its missing keys exist, or once `size` ranks have given a value."""

    connection: _Connection
    request: int
    keys: list[bytes]
    missing: set[bytes]
    wants_values: bool
    size: int = 0


class StoreServer:
    """Serves the store on a listening socket until its owner has ended.

    Args:
        listener: the listening socket, which is closed at the end.
        key: the key that clients must have.
        owner_pid: the owner, which is the parent of this process.
        owner_pipe: a file descriptor that returns end of file when the owner has ended. The owner's end is
            also detected by its process ID, up to a second later, because its children may keep the pipe
            open.
        will: a key, and the value that is set if the owner ends without a goodbye. Clients that wait for
            the key are notified in this way.
        warn: called with a line about rejected connections: the 1st, the 10th, the 100th, ...
        on_owner_end: called when the owner has ended.
        max_bytes: limit on the total size of keys and values.
    """

    def __init__(
        self,
        listener: socket.socket,
        key: bytes,
        *,
        owner_pid: int,
        owner_pipe: int | None = None,
        will: tuple[bytes, bytes] | None = None,
        warn: Callable[[str], None],
        on_owner_end: Callable[[], None] = lambda: None,
        max_bytes: int = MAX_STORE_BYTES,
    ) -> None:
        self._listener, self._key, self._will, self._warn = listener, key, will, warn
        self._owner_pid, self._owner_pipe, self._on_owner_end = owner_pid, owner_pipe, on_owner_end
        self._max_bytes = max_bytes
        self._values: dict[bytes, bytes] = {}
        self._num_bytes = 0
        self._waiting: dict[bytes, set[_Wait]] = {}
        self._given: dict[bytes, dict[int, bytes]] = {}
        self._takers: dict[bytes, _Wait] = {}
        self._connections: set[_Connection] = set()
        self._unauthenticated: dict[_Connection, None] = {}  # in the order of their arrival
        self._num_refused = 0
        self._owner_ended_s: float | None = None
        self._owner_said_goodbye = False
        self._selector = selectors.DefaultSelector()

    def serve(self) -> None:
        """Serves until the owner has ended and all clients have disconnected, or `LINGER_S` after its end."""
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        if self._owner_pipe is not None:
            self._selector.register(self._owner_pipe, selectors.EVENT_READ)
        try:
            while not self._is_finished():
                for event, mask in self._selector.select(1.0):
                    if event.fileobj is self._listener:
                        self._accept()
                    elif event.fileobj == self._owner_pipe:
                        self._handle_owner_end()
                    elif event.data in self._connections:
                        if mask & selectors.EVENT_WRITE:
                            self._send(event.data)
                        if mask & selectors.EVENT_READ:
                            self._receive(event.data)
                self._close_slow_handshakes()
                if os.getppid() != self._owner_pid:
                    self._handle_owner_end()
        finally:
            for connection in list(self._connections):
                self._close(connection)
            self._listener.close()  # has no effect if `_handle_owner_end` has already closed it
            self._selector.close()

    def _is_finished(self) -> bool:
        if self._owner_ended_s is None:
            return False
        has_clients = len(self._connections) > len(self._unauthenticated)
        return not has_clients or time.monotonic() > self._owner_ended_s + LINGER_S

    def _handle_owner_end(self) -> None:
        if self._owner_ended_s is not None:
            return
        self._owner_ended_s = time.monotonic()
        # The next attempt of the job may use the port, and its ranks must not connect to this server.
        self._selector.unregister(self._listener)
        self._listener.close()
        if self._owner_pipe is not None:
            self._selector.unregister(self._owner_pipe)
        self._on_owner_end()
        if not self._owner_said_goodbye and self._will is not None and self._will[0] not in self._values:
            self._set(*self._will)

    # Methods that manage connections.

    def _accept(self) -> None:
        try:
            accepted, address = self._listener.accept()
        except OSError:
            # There may be no free file descriptor, so close the oldest unauthenticated connection.
            if self._unauthenticated:
                self._refuse(next(iter(self._unauthenticated)))
            else:
                time.sleep(0.01)
            return
        accepted.setblocking(False)
        with contextlib.suppress(OSError):
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            accepted.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection = _Connection(accepted, str(address[0]), os.urandom(32), time.monotonic())
        self._connections.add(connection)
        self._unauthenticated[connection] = None
        self._selector.register(accepted, selectors.EVENT_READ, connection)
        self._queue(connection, challenge(connection.nonce))
        if len(self._unauthenticated) > MAX_UNAUTHENTICATED:
            self._refuse(next(iter(self._unauthenticated)))

    def _receive(self, connection: _Connection) -> None:
        limit = _PIECE_BYTES if connection.reader else RESPONSE_BYTES - len(connection.received)
        try:
            received = connection.socket.recv(limit)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        if not received:
            # If no data was received, there is no warning: the peer may only have checked that the port is
            # open.
            if connection.reader or not connection.received:
                self._close(connection)
            else:
                self._refuse(connection)
            return
        try:
            if connection.reader is None:
                self._shake_hands(connection, received)
                return
            for op, request, fields in connection.reader.messages(received):
                self._handle(connection, op, request, fields)
        except (ProtocolError, ValueError):
            self._refuse(connection)

    def _shake_hands(self, connection: _Connection, received: bytes) -> None:
        connection.received += received
        if len(connection.received) < RESPONSE_BYTES:
            return
        proof = bytes(connection.received)
        if not is_response(self._key, connection.nonce, proof):
            raise ProtocolError("the client does not have the key")
        nonces = connection.nonce, proof[:32]
        client_key, server_key = stream_keys(self._key, *nonces)
        self._queue(connection, server_proof(self._key, *nonces))
        connection.reader, connection.writer = FrameReader(client_key), FrameWriter(server_key)
        del self._unauthenticated[connection]

    def _close_slow_handshakes(self) -> None:
        latest_s = time.monotonic() - HANDSHAKE_S
        while self._unauthenticated and (oldest := next(iter(self._unauthenticated))).opened_s < latest_s:
            self._refuse(oldest)

    def _refuse(self, connection: _Connection) -> None:
        self._close(connection)
        self._num_refused += 1
        count = self._num_refused
        if count == 10 ** (len(str(count)) - 1):  # the 1st, 10th, 100th, ... connection
            self._warn(
                f"rejected a connection from {connection.address} without this job's key"
                + (f" ({count} so far)" if count > 1 else "")
                + "; possible causes are a port scan, another job, or an attempt to interfere with this one"
            )

    def _close(self, connection: _Connection) -> None:
        self._connections.discard(connection)
        self._unauthenticated.pop(connection, None)
        for wait in connection.waits.values():
            self._cancel_wait(wait)
        self._selector.unregister(connection.socket)
        connection.socket.close()

    def _queue(self, connection: _Connection, data: bytes) -> None:
        connection.unsent.append(data)
        connection.unsent_bytes += len(data)
        self._send(connection)

    def _send(self, connection: _Connection) -> None:
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

    # Methods that answer requests.

    def _handle(self, connection: _Connection, op: int, request: int, fields: list[bytes]) -> None:
        if op in (Op.GET, Op.WAIT):
            self._wait(connection, request, fields, wants_values=op == Op.GET)
            return
        if op == Op.CANCEL:
            if request in connection.waits:
                self._cancel_wait(connection.waits.pop(request))
            return
        if op == Op.TAKE:
            key, size = fields
            wait = _Wait(connection, request, [key], set(), wants_values=True, size=int(size))
            connection.waits[request] = self._takers[key] = wait
            self._answer_taker(key)
            return
        try:
            answer = self._do(op, fields)
        except _RefusedError as error:
            self._reply(connection, Status.REFUSED, request, [str(error).encode()])
        else:
            self._reply(connection, Status.DONE, request, answer)

    def _do(self, op: int, fields: list[bytes]) -> list[bytes]:
        """Returns the answer to a request that can be answered at once.

        Raises:
            ProtocolError: the operation is unknown, or the number of fields is wrong.
        """
        values = self._values
        match op, fields:
            case Op.SET, [key, value]:
                self._set(key, value)
                return []
            case Op.CHECK, keys:
                return [b"1" if all(key in values for key in keys) else b"0"]
            case Op.ADD, [key, number]:
                total = b"%d" % (_number(values.get(key, b"0")) + _number(number))
                self._set(key, total)
                return [total]
            case Op.COMPARE_SET, [key, expected, desired]:
                return [self._compare_set(key, expected, desired)]
            case Op.DELETE, [key]:
                old = values.pop(key, None)
                if old is not None:
                    self._num_bytes -= len(key) + len(old) + _PER_ENTRY_BYTES
                return [b"0" if old is None else b"1"]
            case Op.APPEND, [key, value]:
                self._set(key, values.get(key, b"") + value)
                return []
            case Op.GIVE, [key, *pairs]:
                self._give(key, {int(number): value for number, value in batched_pairs(pairs)})
                return []
            case Op.GIVEN, [key]:
                given = sorted(self._given.get(key, {}).items())
                return [field for number, value in given for field in (b"%d" % number, value)]
            case Op.COUNT, []:
                return [b"%d" % len(values)]
            case Op.LIST, []:
                return list(values)
            case Op.GOODBYE, []:
                self._owner_said_goodbye = True
                return []
        raise ProtocolError(f"request {op} has an invalid number of fields ({len(fields)})")

    def _compare_set(self, key: bytes, expected: bytes, desired: bytes) -> bytes:
        old = self._values.get(key)
        if old == expected or (old is None and not expected):
            self._set(key, desired)
            return desired
        return expected if old is None else old

    def _set(self, key: bytes, value: bytes) -> None:
        old = self._values.get(key)
        self._grow(len(value) - len(old) if old is not None else len(key) + len(value) + _PER_ENTRY_BYTES)
        self._values[key] = value
        for wait in self._waiting.pop(key, ()):
            wait.missing.discard(key)
            if not wait.missing:
                del wait.connection.waits[wait.request]
                self._answer(wait)

    def _grow(self, num_bytes: int) -> None:
        if self._num_bytes + num_bytes > self._max_bytes:
            raise _RefusedError(
                f"the ranks' store contains {self._num_bytes} bytes; {num_bytes} more would exceed its limit "
                f"of {self._max_bytes}"
            )
        self._num_bytes += num_bytes

    def _give(self, key: bytes, values: dict[int, bytes]) -> None:
        self._grow(_size_of(values))
        given = self._given.setdefault(key, {})
        self._num_bytes -= _size_of({number: given[number] for number in values if number in given})
        given |= values
        self._answer_taker(key)

    def _answer_taker(self, key: bytes) -> None:
        wait, given = self._takers.get(key), self._given.get(key, {})
        if wait is None or len(given) < wait.size:
            return
        del wait.connection.waits[wait.request], self._takers[key]
        self._num_bytes -= _size_of(self._given.pop(key, {}))
        self._reply(wait.connection, Status.DONE, wait.request, [value for _, value in sorted(given.items())])

    def _wait(self, connection: _Connection, request: int, keys: list[bytes], *, wants_values: bool) -> None:
        missing = {key for key in keys if key not in self._values}
        wait = _Wait(connection, request, keys, missing, wants_values)
        if not missing:
            self._answer(wait)
            return
        connection.waits[request] = wait
        for key in missing:
            self._waiting.setdefault(key, set()).add(wait)

    def _answer(self, wait: _Wait) -> None:
        # A key may have been deleted since the request: then its value is empty, like that of a new key.
        values = [self._values.get(key, b"") for key in wait.keys] if wait.wants_values else []
        self._reply(wait.connection, Status.DONE, wait.request, values)

    def _cancel_wait(self, wait: _Wait) -> None:
        if wait.size and self._takers.get(wait.keys[0]) is wait:
            del self._takers[wait.keys[0]]
        for key in wait.missing:
            waiting = self._waiting.get(key, set())
            waiting.discard(wait)
            if not waiting:
                self._waiting.pop(key, None)

    def _reply(self, connection: _Connection, status: int, request: int, fields: list[bytes]) -> None:
        if connection.writer is not None and connection in self._connections:
            try:
                frame = connection.writer.frame(status, request, fields)
            except ValueError as error:  # larger than the limit of a frame
                frame = connection.writer.frame(Status.REFUSED, request, [str(error).encode()])
            self._queue(connection, frame)


class _RefusedError(Exception):
    """A request that is rejected; the client receives the message."""


def _size_of(values: dict[int, bytes]) -> int:
    return sum(len(value) + _PER_ENTRY_BYTES for value in values.values())


def _number(text: bytes) -> int:
    if len(text) > 20:
        raise _RefusedError("ADD requires a number of at most 20 digits")
    try:
        return int(text)
    except ValueError:
        raise _RefusedError("the stored value is not a number, as ADD requires") from None


def main() -> None:
    """Runs the server. `StoreProcess` passes LISTENER WILL_KEY WILL_VALUE, and the key on stdin."""
    # The ranks handle Ctrl-C and the launcher's signals, and still need the store until they end.
    for sig in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(sig, signal.SIG_IGN)
    owner_pid = os.getppid()
    key = os.read(0, KEY_BYTES)
    if len(key) != KEY_BYTES:
        return  # the process that started this server has ended
    listener, will_key, will_value = sys.argv[1:4]
    StoreServer(
        socket.socket(fileno=int(listener)),
        key,
        owner_pid=owner_pid,
        owner_pipe=0,
        will=(will_key.encode(), will_value.encode()),
        warn=warn,
        on_owner_end=_close_output,
    ).serve()


def warn(text: str) -> None:
    """Prints a warning with the name of this host."""
    with contextlib.suppress(OSError):
        os.write(2, f"[{socket.gethostname().partition('.')[0]}] warning: {text}\n".encode())


def _close_output() -> None:
    # Launchers wait until no process has the ranks' stdout and stderr open, so this process closes them.
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (1, 2):
        os.dup2(null, descriptor)
