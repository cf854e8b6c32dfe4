"""The server of the ranks' key-value store: a separate process on rank 0's node, without torch.

It serves only clients that have the job's key (`store_protocol`). As a separate process it answers
even while rank 0 computes, is stopped or holds the GIL. It runs for a few seconds after the end of
rank 0, so that the other ranks can read what happened.

The requests and their results are those of torch's TCPStore, including `compare_set` of a missing
key: https://docs.pytorch.org/docs/stable/distributed.html#distributed-key-value-store
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from dataclasses import dataclass

from ddp_hpc.rendezvous.frame_server import Connection, FrameServer, Owner
from ddp_hpc.rendezvous.store_protocol import KEY_BYTES, RANK_0_GONE, Op, ProtocolError, Status

MAX_STORE_BYTES = 2**30
_PER_ENTRY_BYTES = 100  # the approximate overhead of Python for a key and a value


@dataclass(eq=False)
class _Wait:
    """A request that is answered once its missing keys exist, or once `size` ranks have given a value."""

    connection: Connection
    request: int
    keys: list[bytes]
    missing: set[bytes]
    wants_values: bool
    size: int = 0


class StoreServer(FrameServer):
    """Serves the store on a listening socket until its owner has ended.

    If the owner ends without a goodbye, the server sets `RANK_0_GONE`, for which clients wait.

    Args:
        listener: the listening socket, which is closed at the end.
        key: the key that clients must have.
        owner: see `FrameServer`.
        num_clients: see `FrameServer`.
        max_bytes: limit on the total size of keys and values.
    """

    def __init__(
        self,
        listener: socket.socket,
        key: bytes,
        owner: Owner,
        *,
        num_clients: int = 0,
        max_bytes: int = MAX_STORE_BYTES,
    ) -> None:
        super().__init__(listener, key, owner, num_clients=num_clients)
        self._max_bytes = max_bytes
        self._values: dict[bytes, bytes] = {}
        self._num_bytes = 0
        self._waiting: dict[bytes, set[_Wait]] = {}
        self._given: dict[bytes, dict[int, bytes]] = {}
        self._takers: dict[bytes, _Wait] = {}
        self._owner_said_goodbye = False

    def _handle_owner_end(self) -> None:
        if self._owner_ended_s is not None:
            return
        super()._handle_owner_end()
        if not self._owner_said_goodbye:
            key, value = RANK_0_GONE
            self._set(key.encode(), value.encode())

    def _handle_end(self, connection: Connection) -> None:
        for wait in connection.requests.values():
            self._cancel_wait(wait)

    def _handle(self, connection: Connection, op: int, request: int, fields: list[bytes]) -> None:
        if op in (Op.GET, Op.WAIT):
            self._wait(connection, request, fields, wants_values=op == Op.GET)
            return
        if op == Op.CANCEL:
            if request in connection.requests:
                self._cancel_wait(connection.requests.pop(request))
            return
        if op == Op.TAKE:
            key, size = fields
            wait = _Wait(connection, request, [key], set(), wants_values=True, size=int(size))
            connection.requests[request] = self._takers[key] = wait
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
            case Op.GIVE, [key, number, value]:
                self._give(key, int(number), value)
                return []
            case Op.GIVEN, [key]:
                given = sorted(self._given.get(key, {}).items())
                return [field for number, value in given for field in (b"%d" % number, value)]
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
                del wait.connection.requests[wait.request]
                self._answer(wait)

    def _grow(self, num_bytes: int) -> None:
        if self._num_bytes + num_bytes > self._max_bytes:
            raise _RefusedError(
                f"the ranks' store contains {self._num_bytes} bytes; {num_bytes} more would exceed its limit "
                f"of {self._max_bytes}"
            )
        self._num_bytes += num_bytes

    def _give(self, key: bytes, number: int, value: bytes) -> None:
        given = self._given.setdefault(key, {})
        old = _size_of({number: given[number]}) if number in given else 0
        self._grow(_size_of({number: value}) - old)
        given[number] = value
        self._answer_taker(key)

    def _answer_taker(self, key: bytes) -> None:
        wait, given = self._takers.get(key), self._given.get(key, {})
        if wait is None or len(given) < wait.size:
            return
        del wait.connection.requests[wait.request], self._takers[key]
        self._num_bytes -= _size_of(self._given.pop(key, {}))
        self._reply(wait.connection, Status.DONE, wait.request, [value for _, value in sorted(given.items())])

    def _wait(self, connection: Connection, request: int, keys: list[bytes], *, wants_values: bool) -> None:
        missing = {key for key in keys if key not in self._values}
        wait = _Wait(connection, request, keys, missing, wants_values)
        if not missing:
            self._answer(wait)
            return
        connection.requests[request] = wait
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


def _close_output() -> None:
    """Closes stdout and stderr, because launchers wait until all processes have closed them."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (1, 2):
        os.dup2(null, descriptor)


def main() -> None:
    """Runs the server. `StoreProcess` passes LISTENER and CLIENTS as arguments, and the key on stdin."""
    owner = Owner(os.getppid(), pipe=0, on_end=_close_output)
    # The ranks handle Ctrl-C and the launcher's signals, and still need the server until they end.
    for sig in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(sig, signal.SIG_IGN)
    key = os.read(0, KEY_BYTES)
    if len(key) == KEY_BYTES:  # otherwise, the owner has already ended
        listener = socket.socket(fileno=int(sys.argv[1]))
        StoreServer(listener, key, owner, num_clients=int(sys.argv[2])).serve()
