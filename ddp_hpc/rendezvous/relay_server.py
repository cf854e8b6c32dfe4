"""The relay of a node: a separate process that connects all ranks of the node to rank 0 over two connections.

One connection leads to the ranks' store, and one to rank 0's heartbeat monitor. Without relays, rank 0 would
need two connections to each rank. The relay is a server with the job's key for its ranks, and a client of
the store. It forwards requests, and combines some of them to reduce the number of messages: it collects
the values that its ranks give, and sends only one request for a shared key that several ranks wait for.

If the store is lost, the last message of the relay reports this. If the relay itself ends, its ranks connect
to rank 0 themselves.
"""

from __future__ import annotations

import contextlib
import hmac
import itertools
import math
import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ddp_hpc.rendezvous.frame_server import (
    Connection,
    FrameServer,
    Owner,
    close_output,
    read_key_of_owner,
)
from ddp_hpc.rendezvous.keepalive import is_cut_off, let_kernel_watch
from ddp_hpc.rendezvous.store_client import Channel, connect_once
from ddp_hpc.rendezvous.store_protocol import OBSERVER, Op, ProtocolError, Status

ENDED = "ended"
"""The last line that a rank receives if the monitor has closed its connection."""
CUT_OFF = "cut off"
"""The last line that a rank receives if rank 0's node does not answer."""
_COLLECT_S = 0.02
_MAX_COLLECTED_BYTES = 2**20
_CONNECT_S = 20.0
_TRY_S = 5.0
_LINE_BYTES = 1 << 20
_LINE = 255  # the kind of the messages on a connection with lines
_WAITS = (Op.GET, Op.GET_SHARED, Op.WAIT, Op.TAKE)


class _LineReader:
    """Decodes lines as messages with one field."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def messages(self, received: bytes) -> Iterator[tuple[int, int, list[bytes]]]:
        """Yields a message for each line that these bytes complete."""
        self._buffer += received
        *lines, self._buffer = self._buffer.split(b"\n")
        if len(self._buffer) > _LINE_BYTES:
            raise ProtocolError("received a line that is too long")
        for line in lines:
            yield _LINE, 0, [bytes(line)]


class _LineWriter:
    """Encodes messages with one field as lines."""

    def frame(self, kind: int, request: int, fields: Sequence[bytes]) -> bytes:
        """Returns the field as a line."""
        del kind, request
        return fields[0] + b"\n"


@dataclass(eq=False)
class _Asked:
    """A request to the store, and the requests of ranks that receive its answer."""

    key: bytes
    askers: list[tuple[Connection, int]]


@dataclass(eq=False)
class _Given:
    """Values from ranks that have not been sent to the store yet."""

    since_s: float
    fields: list[bytes] = field(default_factory=list)
    num_bytes: int = 0
    askers: list[tuple[Connection, int]] = field(default_factory=list)


class Relay(FrameServer):
    """Serves the ranks of one node, over a channel to the store at `host` and `port`."""

    def __init__(
        self,
        listener: socket.socket,
        key: bytes,
        channel: Channel,
        host: str,
        port: int,
        owner: Owner,
    ) -> None:
        super().__init__(listener, key, owner, linger_s=math.inf)
        channel.socket.setblocking(False)
        self._host, self._port = host, port
        self._store = Connection(channel.socket, "store", reader=channel.reader, writer=channel.writer)
        self._writer, self._is_lost = channel.writer, False
        self._numbers = itertools.count(1)
        self._asked: dict[int, _Asked] = {}
        self._shared: dict[bytes, int] = {}  # the request for each shared key
        self._given: dict[bytes, _Given] = {}
        self._monitor: Connection | None = None
        self._monitor_nonce = b""
        self._beating: dict[bytes, Connection] = {}  # the connections of ranks with a heartbeat, by rank
        self._rank_of: dict[Connection, bytes] = {}
        self._observers: set[Connection] = set()
        self._add(self._store)

    def _num_clients(self) -> int:
        return super()._num_clients() - 1 - (self._monitor is not None)

    def _is_finished(self) -> bool:
        return self._is_lost or super()._is_finished()

    def _wait_s(self) -> float:
        return _COLLECT_S / 2 if self._given else 1.0

    def _finish_turn(self) -> None:
        latest_s = time.monotonic() - _COLLECT_S
        for key in [key for key, given in self._given.items() if given.since_s < latest_s]:
            self._send_given(key)

    def _handle(self, connection: Connection, op: int, request: int, fields: list[bytes]) -> None:
        if connection is self._store:
            self._deliver(op, request, fields)
        elif connection is self._monitor:
            self._pass_to_ranks(fields[0])
        elif connection in self._rank_of:
            self._send_to_monitor(self._rank_of[connection], fields[0])
        elif op == Op.CANCEL:
            self._cancel(connection, request)
        elif op == Op.GIVE:
            self._collect(connection, request, fields)
        elif op == Op.WHERE:
            if fields == [OBSERVER]:
                self._observers.add(connection)
            self._reply(connection, Status.DONE, request, [self._host.encode(), b"%d" % self._port])
        elif op == Op.HEARTBEAT:
            self._connect_heartbeat(connection, request, fields)
        elif op == Op.GET_SHARED and fields and fields[0] in self._shared:
            number = self._shared[fields[0]]
            self._asked[number].askers.append((connection, request))
            connection.requests[request] = number
        else:
            number = self._ask(Op(op), fields, [(connection, request)])
            if op in _WAITS and number in self._asked:
                connection.requests[request] = number
                if op == Op.GET_SHARED and fields:
                    self._shared[fields[0]] = number

    def _handle_end(self, connection: Connection) -> None:
        if connection is self._store:
            self._is_lost = True
            cause = os.strerror(connection.error.errno or 0) if connection.error else "it has ended"
            text = f"the relay of this node has lost the connection to the ranks' store ({cause})".encode()
            for client in self._connections - set(self._rank_of):
                self._reply(client, Status.LOST, 0, [text])
        elif connection is self._monitor:
            self._end_heartbeats(connection.error)
        elif connection in self._rank_of:
            rank = self._rank_of.pop(connection)
            if self._beating.get(rank) is connection:
                del self._beating[rank]
                self._send_to_monitor(rank, b"closed")
        self._observers.discard(connection)
        for request in list(connection.requests):
            self._cancel(connection, request)

    # Requests to the store.

    def _ask(self, op: int, fields: list[bytes], askers: list[tuple[Connection, int]]) -> int:
        number = next(self._numbers) % 2**32
        self._asked[number] = _Asked(fields[0] if fields else b"", askers)
        try:
            self._queue(self._store, self._writer.frame(op, number, fields))
        except ValueError as error:  # larger than the limit of a frame
            self._deliver(Status.REFUSED, number, [str(error).encode()])
        return number

    def _deliver(self, status: int, number: int, fields: list[bytes]) -> None:
        asked = self._asked.pop(number, None)
        if asked is None:
            return
        if self._shared.get(asked.key) == number:
            del self._shared[asked.key]
        for connection, request in asked.askers:
            connection.requests.pop(request, None)
            self._reply(connection, status, request, fields)

    def _cancel(self, connection: Connection, request: int) -> None:
        number = connection.requests.pop(request, None)
        asked = self._asked.get(number) if number is not None else None
        if number is None or asked is None:
            return
        asked.askers.remove((connection, request))
        if not asked.askers:
            del self._asked[number]
            if self._shared.get(asked.key) == number:
                del self._shared[asked.key]
            self._queue(self._store, self._writer.frame(Op.CANCEL, number, []))

    def _collect(self, connection: Connection, request: int, fields: list[bytes]) -> None:
        key, *pairs = fields
        given = self._given.setdefault(key, _Given(time.monotonic()))
        given.fields += pairs
        given.num_bytes += sum(map(len, pairs))
        given.askers.append((connection, request))
        num_ranks = self._num_clients() - len(self._rank_of) - len(self._observers)
        if len(given.askers) >= num_ranks or given.num_bytes > _MAX_COLLECTED_BYTES:
            self._send_given(key)

    def _send_given(self, key: bytes) -> None:
        given = self._given.pop(key)
        self._ask(Op.GIVE, [key, *given.fields], given.askers)

    # The heartbeat: lines `of RANK TEXT` to the monitor, and lines `to RANK TEXT` and `all TEXT` from it.

    def _connect_heartbeat(self, connection: Connection, request: int, fields: list[bytes]) -> None:
        rank, host, port, nonce, node, silent_s = fields
        if self._monitor is None:
            try:
                self._connect_monitor(host.decode(), int(port), nonce, node, float(silent_s))
            except (OSError, UnicodeError) as error:
                self._reply(connection, Status.REFUSED, request, [str(error).encode()])
                return
        if not hmac.compare_digest(nonce, self._monitor_nonce):
            self._reply(connection, Status.REFUSED, request, [b"the relay serves another heartbeat"])
            return
        self._reply(connection, Status.DONE, request, [])
        connection.reader, connection.writer = _LineReader(), _LineWriter()
        self._beating[rank], self._rank_of[connection] = connection, rank
        self._send_to_monitor(rank, b"hello " + node)

    def _connect_monitor(self, host: str, port: int, nonce: bytes, node: bytes, silent_s: float) -> None:
        monitor = socket.create_connection((host, port), timeout=_TRY_S)
        let_kernel_watch(monitor, silent_s)
        monitor.setblocking(False)
        self._monitor_nonce = nonce
        self._monitor = Connection(monitor, "monitor", reader=_LineReader(), writer=_LineWriter())
        self._add(self._monitor)
        self._queue(self._monitor, b"hello %s relay %s\n" % (nonce, node))

    def _send_to_monitor(self, rank: bytes, line: bytes) -> None:
        if self._monitor is not None:
            self._reply(self._monitor, _LINE, 0, [b"of %s %s" % (rank, line)])

    def _pass_to_ranks(self, line: bytes) -> None:
        word, _, rest = line.partition(b" ")
        if word == b"to":
            rank, _, rest = rest.partition(b" ")
            receivers = [self._beating[rank]] if rank in self._beating else []
        else:
            receivers = list(self._beating.values())
        for connection in receivers:
            self._reply(connection, _LINE, 0, [rest])

    def _end_heartbeats(self, error: OSError | None) -> None:
        self._monitor = None
        last = CUT_OFF if error is not None and is_cut_off(error) else ENDED
        for connection in list(self._rank_of):
            self._reply(connection, _LINE, 0, [last.encode()])
            self._close(connection)


def main() -> None:
    """Runs the relay. `RelayProcess` passes LISTENER HOST PORT, and the key on stdin."""
    owner = Owner(os.getppid(), pipe=0, on_end=close_output)
    if not (key := read_key_of_owner()):
        return
    listener, host, port = sys.argv[1:4]
    with socket.socket(fileno=int(listener)) as accepting, contextlib.suppress(OSError, ProtocolError):
        channel = connect_once(host, int(port), key, _CONNECT_S)
        Relay(accepting, key, channel, host, int(port), owner).serve()
