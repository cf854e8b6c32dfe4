"""The protocol between the clients and the server of torch's TCPStore.

A query is one byte with the number of the operation, followed by the fields. Numbers are in the byte order
of the machine, because the client and the server are on the same node. If a query has an answer, the client
waits for it before it sends another query. Some queries, such as SET, have no answer. Sources: torch 2.8 to
2.13, torch/csrc/distributed/c10d/TCPStoreBackend.hpp, TCPStore.cpp and TCPStoreLibUvBackend.cpp.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator, Sequence
from enum import IntEnum

from ddp_hpc.rendezvous.store_protocol import MAX_FRAME_BYTES, ProtocolError

MAGIC = struct.pack("=I", 0x3C85F7CE)
"""The field of VALIDATE, which must be the first query of a client."""
_MAX_FIELDS = 128 * 1024  # MAX_KEY_COUNT in TCPStoreLibUvBackend.cpp
_SIZE = struct.Struct("=Q")
_NUMBER = struct.Struct("=q")


class Query(IntEnum):
    """The queries of a client. The comments list the fields and the answer of each query."""

    VALIDATE = 0  # MAGIC; not answered
    SET = 1  # key, value; not answered
    COMPARE_SET = 2  # key, expected value, desired value; answered with the value
    GET = 3  # key; answered with the value
    ADD = 4  # key, number; answered with the sum
    CHECK = 5  # keys; answered with 0 if all of them exist, otherwise with 1
    WAIT = 6  # keys; answered with 0 once all of them exist
    GETNUMKEYS = 7  # no fields; answered with the number of keys
    DELETE_KEY = 8  # key; answered with the number of deleted keys
    APPEND = 9  # key, value; not answered
    MULTI_GET = 10  # keys; answered with the values
    MULTI_SET = 11  # key and value of one or more keys; not answered
    CANCEL_WAIT = 12  # no fields; answered with 1; ends a WAIT or a BARRIER
    PING = 13  # a number of 4 bytes; answered with the same number
    QUEUE_PUSH = 14  # key, value; not answered
    QUEUE_POP = 15  # key; answered with the length of the queue, and the first value
    QUEUE_LEN = 16  # key; answered with the length of the queue
    LIST_KEYS = 17  # no fields; answered with all keys
    BARRIER = 18  # key, number of clients; answered with 0 once that many clients have sent it


QUERY_NAMES: dict[int, str] = {query.value: query.name for query in Query}
"""The names of the queries by their numbers."""
_NOT_ANSWERED = (Query.VALIDATE, Query.SET, Query.APPEND, Query.MULTI_SET, Query.QUEUE_PUSH)
# The parts of each query: "4" stands for 4 bytes, "n" for a number, "s" for a string with its length, "*" for
# the number of keys, followed by the keys, and "+" for the number of pairs, followed by keys and values.
_PARTS = {
    Query.VALIDATE: "4",
    Query.SET: "ss",
    Query.COMPARE_SET: "sss",
    Query.GET: "s",
    Query.ADD: "sn",
    Query.CHECK: "*",
    Query.WAIT: "*",
    Query.GETNUMKEYS: "",
    Query.DELETE_KEY: "s",
    Query.APPEND: "ss",
    Query.MULTI_GET: "*",
    Query.MULTI_SET: "+",
    Query.CANCEL_WAIT: "",
    Query.PING: "4",
    Query.QUEUE_PUSH: "ss",
    Query.QUEUE_POP: "s",
    Query.QUEUE_LEN: "s",
    Query.LIST_KEYS: "",
    Query.BARRIER: "sn",
}


class _IncompleteError(Exception):
    """The rest of the query has not been received yet."""


class TorchStream:
    """Decodes the queries of one client, and encodes the answers.

    The fields of decoded queries and of answers contain numbers as decimal digits.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._is_valid = False
        self._numbers = itertools.count(1)
        self._unanswered: dict[int, Query] = {}

    def messages(self, received: bytes) -> Iterator[tuple[int, int, list[bytes]]]:
        """Yields each query that these bytes complete, with a sequence number and its fields.

        An unknown query of a TCPStore client is yielded without fields, and is the last one.

        Raises:
            ProtocolError: the client is not a TCPStore client, or a query is too long.
        """
        self._buffer += received
        while self._buffer:
            if self._is_valid and self._buffer[0] not in _PARTS:
                yield self._buffer[0], next(self._numbers), []
                return
            try:
                query, fields, num_bytes = _parsed(self._buffer)
            except _IncompleteError:
                return
            del self._buffer[:num_bytes]
            if not self._is_valid and (query != Query.VALIDATE or fields != [MAGIC]):
                raise ProtocolError("the first query is not that of a TCPStore client")
            self._is_valid = True
            if query == Query.VALIDATE:
                continue
            number = next(self._numbers)
            if query not in _NOT_ANSWERED:
                self._unanswered[number] = query
            yield query, number, fields

    def frame(self, kind: int, request: int, fields: Sequence[bytes]) -> bytes:
        """Returns the answer to the query with this number; empty if the query is not answered."""
        del kind
        query = self._unanswered.pop(request, None)
        match query:
            case None:
                return b""
            case Query.CHECK:
                return b"\0" if fields == [b"1"] else b"\1"
            case Query.WAIT | Query.BARRIER:
                return b"\0"
            case Query.CANCEL_WAIT:
                return b"\1"
            case Query.PING:
                return fields[0]
            case Query.ADD | Query.DELETE_KEY | Query.GETNUMKEYS:
                return _NUMBER.pack(int(fields[0]))
            case Query.LIST_KEYS:
                return _NUMBER.pack(len(fields)) + _strings(fields)
        return _strings(fields)


def _strings(fields: Sequence[bytes]) -> bytes:
    return b"".join(part for field in fields for part in (_SIZE.pack(len(field)), field))


def _parsed(data: bytearray) -> tuple[Query, list[bytes], int]:
    """Returns the first query, its fields and its size in bytes.

    Raises:
        _IncompleteError: the query has not been received completely.
        ProtocolError: the query is unknown or too long.
    """
    try:
        query = Query(data[0])
    except ValueError:
        raise ProtocolError(f"received the unknown query {data[0]}") from None
    at, fields, parts = 1, list[bytes](), list(_PARTS[query])
    while parts:
        part = parts.pop(0)
        if part in "4s":
            size = 4
            if part == "s":
                size, at = _size(data, at), at + _SIZE.size
            if at + size > MAX_FRAME_BYTES:
                raise ProtocolError(f"received a query of more than {MAX_FRAME_BYTES} bytes")
            if at + size > len(data):
                raise _IncompleteError
            fields.append(bytes(data[at : at + size]))
            at += size
            continue
        number, at = _size(data, at), at + _SIZE.size
        if part == "n":
            fields.append(b"%d" % int.from_bytes(number.to_bytes(8, "big"), "big", signed=True))
        elif number > _MAX_FIELDS:
            raise ProtocolError(f"received a query with {number} keys; the limit is {_MAX_FIELDS}")
        else:
            parts += "s" * (number if part == "*" else 2 * number)
    return query, fields, at


def _size(data: bytearray, at: int) -> int:
    if at + _SIZE.size > len(data):
        raise _IncompleteError
    (size,) = _SIZE.unpack_from(data, at)
    return int(size)
