"""A rank's connection to the ranks' key-value store.

All threads of a rank share one connection: a background thread reads the answers and passes each to
the thread that waits for it. Every wait has a time limit and can be interrupted by signals.
"""

from __future__ import annotations

import contextlib
import hmac
import itertools
import os
import random
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Callable, Container, Sequence
from queue import Empty, SimpleQueue

from ddp_hpc.base.errors import RendezvousError
from ddp_hpc.rendezvous.keepalive import let_kernel_watch
from ddp_hpc.rendezvous.store_protocol import (
    CHALLENGE_BYTES,
    GREETING,
    PROOF_BYTES,
    FrameStream,
    Op,
    ProtocolError,
    Status,
    batched_pairs,
    response,
    server_proof,
    stream_keys,
)

_TRY_S = 5.0  # time limit of one attempt to connect, including the handshake
_RETRY_S, _MAX_RETRY_S = 0.2, 2.0
# The connection is closed if the other host does not respond for this time; heartbeats detect this earlier.
_DEAD_PEER_S = 120.0

Answer = list[bytes] | RendezvousError
"""The fields of the store's answer, or the error that occurred instead."""


class StoreTimeoutError(RendezvousError, TimeoutError):
    """The store did not answer within the time limit."""


class StoreLostError(RendezvousError, ConnectionError):
    """The connection to the store has ended: rank 0, its host or the network between them has failed."""


class StoreRefusedError(RendezvousError, ValueError):
    """The store has rejected the request, or the request is too large to be sent."""


class StoreClient:
    """A connection to the ranks' store, created by `connect`. Thread-safe.

    Raises:
        StoreTimeoutError: every method with `timeout_s` raises it after that number of seconds.
        StoreLostError: every method except `close` raises it after the connection has ended.
    """

    def __init__(self, connection: socket.socket, stream: FrameStream, host: str, port: int) -> None:
        self.host, self.port = host, port
        self._connection, self._stream = connection, stream
        self._wake_writer, self._wake_reader = socket.socketpair()
        self._outgoing: SimpleQueue[tuple[Op, int, list[bytes]]] = SimpleQueue()
        self._waiting: dict[int, Callable[[Answer], None]] = {}
        self._numbers = itertools.count(1)
        self._lost: StoreLostError | None = None
        self._thread = threading.Thread(target=self._run, name="store", daemon=True)
        self._thread.start()
        _open_clients.add(self)

    def set(self, key: str, value: bytes, timeout_s: float) -> None:
        """Sets the value of a key."""
        self._call(Op.SET, [key.encode(), value], timeout_s)

    def get(self, keys: Sequence[str], timeout_s: float) -> list[bytes]:
        """Waits until all keys exist, and returns their values."""
        return self._call(Op.GET, [key.encode() for key in keys], timeout_s)

    def wait(self, keys: Sequence[str], timeout_s: float) -> None:
        """Waits until all keys exist."""
        self._call(Op.WAIT, [key.encode() for key in keys], timeout_s)

    def check(self, keys: Sequence[str], timeout_s: float) -> bool:
        """Returns whether all keys exist."""
        return self._call(Op.CHECK, [key.encode() for key in keys], timeout_s) == [b"1"]

    def add(self, key: str, number: int, timeout_s: float) -> int:
        """Adds a number to the value of a key, which is 0 if the key does not exist, and returns the sum."""
        return int(self._call(Op.ADD, [key.encode(), b"%d" % number], timeout_s)[0])

    def compare_set(self, key: str, expected: bytes, desired: bytes, timeout_s: float) -> bytes:
        """Stores `desired` if the value is `expected`, or if the key does not exist and `expected` is empty.

        Returns the value afterwards, or `expected` if the key does not exist.
        """
        return self._call(Op.COMPARE_SET, [key.encode(), expected, desired], timeout_s)[0]

    def delete(self, key: str, timeout_s: float) -> bool:
        """Removes a key and returns whether it existed."""
        return self._call(Op.DELETE, [key.encode()], timeout_s) == [b"1"]

    def append(self, key: str, value: bytes, timeout_s: float) -> None:
        """Appends bytes to the value of a key."""
        self._call(Op.APPEND, [key.encode(), value], timeout_s)

    def give(self, key: str, number: int, value: bytes, timeout_s: float) -> None:
        """Adds the value of the rank with this number to the values that another rank takes."""
        self._call(Op.GIVE, [key.encode(), b"%d" % number, value], timeout_s)

    def take(self, key: str, size: int, timeout_s: float) -> list[bytes]:
        """Waits until `size` ranks have given a value; returns the values by rank, and removes them."""
        return self._call(Op.TAKE, [key.encode(), b"%d" % size], timeout_s)

    def given(self, key: str, timeout_s: float) -> dict[int, bytes]:
        """Returns the values that have been given so far, by rank."""
        fields = self._call(Op.GIVEN, [key.encode()], timeout_s)
        return {int(number): value for number, value in batched_pairs(fields)}

    def goodbye(self, timeout_s: float) -> None:
        """Announces that rank 0 is about to end on purpose, so the server does not report its end."""
        self._call(Op.GOODBYE, [], timeout_s)

    def when_set(self, key: str, call: Callable[[Answer], None]) -> None:
        """Calls `call` with the key's value once the key exists, or with an error if the connection ends.

        If the key is set more than once, `call` may receive any of its values. The background thread of the
        connection makes the call, so `call` must not block.
        """
        self._send(Op.GET, [key.encode()], call)

    def _send(self, op: Op, fields: list[bytes], call: Callable[[Answer], None]) -> int:
        """Sends a request and returns its number. `call` receives the answer, as in `when_set`."""
        request = next(self._numbers) % 2**32
        self._waiting[request] = call
        # Checked after the request is registered: either `_end` sees the request, or `_lost` is already set.
        if self._lost is not None:
            self._waiting.pop(request, None)
            raise self._lost
        self._post(op, request, fields)
        return request

    def _cancel(self, request: int) -> None:
        """Stops waiting for the answer to a request."""
        if self._waiting.pop(request, None) is not None:
            self._post(Op.CANCEL, request, [])

    def close(self) -> None:
        """Closes the connection; waiting threads receive StoreLostError. Not collective; never raises."""
        _open_clients.discard(self)
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        if self._thread is not threading.current_thread():
            self._thread.join(_TRY_S)
        for own in (self._connection, self._wake_writer, self._wake_reader):
            own.close()

    def _call(self, op: Op, fields: list[bytes], timeout_s: float) -> list[bytes]:
        answers: SimpleQueue[Answer] = SimpleQueue()
        request = self._send(op, fields, answers.put)
        try:
            answer = answers.get(timeout=max(timeout_s, 0.001))
        except Empty:
            raise StoreTimeoutError(
                f"no answer from the ranks' store at {self.host}:{self.port} within {timeout_s:g} s"
            ) from None
        finally:
            self._cancel(request)
        if isinstance(answer, RendezvousError):
            raise answer
        return answer

    def _post(self, op: Op, request: int, fields: list[bytes]) -> None:
        """Passes a frame to the background thread, where no exception of a signal handler can truncate it."""
        self._outgoing.put((op, request, fields))
        with contextlib.suppress(OSError):
            self._wake_writer.send(b"!")

    def _run(self) -> None:
        error: Exception | None = None
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._connection, selectors.EVENT_READ)
                selector.register(self._wake_reader, selectors.EVENT_READ)
                while self._exchange({key.fileobj for key, _ in selector.select()}):
                    pass
        except (OSError, ProtocolError) as caught:
            error = caught
        self._end(error)

    def _exchange(self, ready: Container[object]) -> bool:
        """Sends queued requests and delivers received answers; returns False once the server has ended."""
        if self._wake_reader in ready:
            self._wake_reader.recv(4096)
            while not self._outgoing.empty():
                op, request, fields = self._outgoing.get()
                try:
                    self._connection.sendall(self._stream.frame(op, request, fields))
                except ValueError as error:
                    self._deliver(request, StoreRefusedError(str(error)))
        if self._connection in ready:
            received = self._connection.recv(1 << 18)
            if not received:
                return False
            for status, request, fields in self._stream.messages(received):
                self._deliver(request, _answer(status, fields))
        return True

    def _deliver(self, request: int, answer: Answer) -> None:
        call = self._waiting.pop(request, None)
        if call is not None:
            call(answer)

    def _end(self, error: Exception | None) -> None:
        why = f": {_cause(error)}" if error is not None else ""
        where = f"{self.host}:{self.port}"
        self._lost = StoreLostError(f"lost the connection to the ranks' store at {where}{why}")
        for request in list(self._waiting):
            self._deliver(request, self._lost)


def _answer(status: int, fields: list[bytes]) -> Answer:
    if status == Status.DONE:
        return fields
    return StoreRefusedError(fields[0].decode("utf-8", "replace") if fields else "refused")


# A forked child inherits the sockets but not the threads. It must neither use the sockets nor keep them open.
_open_clients: weakref.WeakSet[StoreClient] = weakref.WeakSet()


def _close_in_child() -> None:
    for client in list(_open_clients):
        client._lost = StoreLostError("a forked process has no connection to the ranks' store")
        for inherited in (client._connection, client._wake_writer, client._wake_reader):
            inherited.close()


os.register_at_fork(after_in_child=_close_in_child)


def connect(host: str, ports: Sequence[int], key: Callable[[], bytes], timeout_s: float) -> StoreClient:
    """Returns a connection to the server that has the key. The ports are tried in order.

    `key` is called for each attempt, because the key may come from a file that does not exist yet.

    Raises:
        RendezvousError: after `timeout_s`, with the last cause. Until then every failure is considered
            temporary, because rank 0 may not have started yet.
    """
    end_s, retry_s = time.monotonic() + timeout_s, _RETRY_S
    causes: dict[int, str] = {}
    while True:
        for port in ports:
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                break
            try:
                secret = key()
                return _connect_once(host, port, secret, min(_TRY_S, left_s))
            except (OSError, UnicodeError, ProtocolError) as error:
                causes[port] = _cause(error)
        if time.monotonic() + _RETRY_S > end_s:
            first = causes.get(ports[0], "no answer in time")
            where = f"port {ports[0]}" if len(ports) == 1 else f"{len(ports)} ports ({ports[0]}, ...)"
            raise RendezvousError(f"no answer from {host}, {where}, within {timeout_s:.3g} s: {first}")
        # A random delay that grows, because thousands of ranks may try to connect at the same time.
        wait_s = retry_s * random.uniform(0.5, 1.5)  # noqa: S311 - not for cryptography
        time.sleep(max(min(wait_s, end_s - _RETRY_S - time.monotonic()), 0.0))
        retry_s = min(1.5 * retry_s, _MAX_RETRY_S)


def _connect_once(host: str, port: int, key: bytes, timeout_s: float) -> StoreClient:
    end_s = time.monotonic() + timeout_s
    connection = socket.create_connection((host, port), timeout=timeout_s)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stream = _shake_hands(connection, key, end_s - time.monotonic())
        let_kernel_watch(connection, _DEAD_PEER_S)
    except BaseException:
        connection.close()
        raise
    return StoreClient(connection, stream, host, port)


def _shake_hands(connection: socket.socket, key: bytes, timeout_s: float) -> FrameStream:
    end_s = time.monotonic() + timeout_s
    sent = _receive(connection, CHALLENGE_BYTES, end_s)
    server_nonce, client_nonce = sent[len(GREETING) :], os.urandom(32)
    connection.sendall(response(key, server_nonce, client_nonce))
    try:
        proof = _receive(connection, PROOF_BYTES, end_s)
    except ConnectionError:
        proof = b""
    if not hmac.compare_digest(proof, server_proof(key, server_nonce, client_nonce)):
        raise ProtocolError("the store on this port belongs to another job: it has a different key")
    connection.settimeout(None)
    client_key, server_key = stream_keys(key, server_nonce, client_nonce)
    return FrameStream(sending_key=client_key, receiving_key=server_key)


def _receive(connection: socket.socket, num_bytes: int, end_s: float) -> bytes:
    """Returns the next `num_bytes` bytes from the server; raises TimeoutError if they are late."""
    received = b""
    while len(received) < num_bytes:
        connection.settimeout(max(end_s - time.monotonic(), 0.001))
        piece = connection.recv(num_bytes - len(received))
        received += piece
        if num_bytes == CHALLENGE_BYTES and not GREETING.startswith(received[: len(GREETING)]):
            raise ProtocolError("the port belongs to another program")
        if not piece:
            raise ConnectionResetError("the connection was closed")
    return received


def _cause(error: Exception) -> str:
    if isinstance(error, UnicodeError):
        return "the name does not resolve (a part of it is empty or has more than 63 letters)"
    if isinstance(error, socket.gaierror):
        return f"the name does not resolve ({error.strerror})"
    if isinstance(error, TimeoutError):
        return "timed out; possible causes are a firewall or the wrong network interface"
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)
    return str(error)
