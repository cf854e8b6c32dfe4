"""The protocol between the clients and the server of the ranks' store: a handshake, then frames.

In the handshake both sides prove that they have the job's key without sending it: the server sends a
challenge, and the client answers with its HMAC (RFC 2104). A process without the key can neither read
nor change values. A process that relays bytes between two ranks cannot change them either, because each
frame has a MAC that includes its number in the stream. The content is not encrypted: it consists of
addresses, counts and short JSON texts.

This module imports only the standard library: the server is a small process that starts before torch.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Iterator, Sequence
from enum import IntEnum

KEY_BYTES = 32
GREETING = b"ddp-hpc store 1\n"
CHALLENGE_BYTES = len(GREETING) + 32
"""The size of the server's first message in bytes: the greeting and the server's nonce."""
RESPONSE_BYTES = 64
"""The size of the client's answer in bytes: its nonce and its proof."""
PROOF_BYTES = 32
"""The size of the server's proof in bytes."""
MAX_FRAME_BYTES = 64 * 2**20
RANK_0_GONE = ("rank 0", "gone")
"""The key and the value that the server sets when its owner ends without `StoreClient.goodbye`."""

_HEAD = struct.Struct(">I16s")  # size of the body in bytes, MAC of the body
_BODY = struct.Struct(">BI")  # operation or status, number of the request
_LENGTH = struct.Struct(">I")


class Op(IntEnum):
    """The requests of a client. The comments list the fields of each request."""

    SET = 1  # fields: key, value
    GET = 2  # fields: one or more keys; answered with the values once all keys exist
    WAIT = 3  # fields: one or more keys; answered once all keys exist
    CHECK = 4  # fields: one or more keys
    ADD = 5  # fields: key, number
    COMPARE_SET = 6  # fields: key, expected value, desired value
    DELETE = 7  # field: key
    APPEND = 8  # fields: key, value
    CANCEL = 9  # no fields; the client no longer waits for the request with this number; not answered
    GOODBYE = 10  # no fields; rank 0 is about to end on purpose
    GIVE = 11  # fields: key, number and value of a rank
    TAKE = 12  # fields: key, number of ranks; answered with their values once all ranks have given theirs
    GIVEN = 13  # field: key; answered with number and value of each rank that has given its value


class Status(IntEnum):
    """The result of a request."""

    DONE = 0
    REFUSED = 1  # field: the reason


class ProtocolError(Exception):
    """The peer does not have the key, or does not use this protocol."""


def challenge(nonce: bytes) -> bytes:
    """Returns the server's first message."""
    return GREETING + nonce


def response(key: bytes, server_nonce: bytes, client_nonce: bytes) -> bytes:
    """Returns the client's answer to a challenge."""
    return client_nonce + _mac(key, b"client", server_nonce, client_nonce)


def server_proof(key: bytes, server_nonce: bytes, client_nonce: bytes) -> bytes:
    """Returns the server's answer to a valid response."""
    return _mac(key, b"server", server_nonce, client_nonce)


def is_response(key: bytes, server_nonce: bytes, received: bytes) -> bool:
    """Returns whether the sender of this response has the key."""
    return hmac.compare_digest(received, response(key, server_nonce, received[:32]))


def stream_keys(key: bytes, server_nonce: bytes, client_nonce: bytes) -> tuple[bytes, bytes]:
    """Returns the keys for the frames that the client and the server send over one connection."""
    return (
        _mac(key, b"frames of the client", server_nonce, client_nonce),
        _mac(key, b"frames of the server", server_nonce, client_nonce),
    )


def _mac(key: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, b"\0".join(parts), "sha256")


class FrameStream:
    """Encodes the frames that one side of a connection sends, and decodes those that it receives."""

    def __init__(self, sending_key: bytes, receiving_key: bytes) -> None:
        self._sending_key, self._receiving_key = sending_key, receiving_key
        self._num_sent = self._num_received = 0
        self._buffer = bytearray()

    def frame(self, kind: int, request: int, fields: Sequence[bytes]) -> bytes:
        """Returns the next frame.

        Raises:
            ValueError: the frame would be larger than `MAX_FRAME_BYTES`.
        """
        parts = (part for field in fields for part in (_LENGTH.pack(len(field)), field))
        body = b"".join((_BODY.pack(kind, request), *parts))
        if len(body) > MAX_FRAME_BYTES:
            raise ValueError(f"a message of {len(body)} bytes exceeds the limit of {MAX_FRAME_BYTES}")
        head = _HEAD.pack(len(body), _frame_mac(self._sending_key, self._num_sent, body))
        self._num_sent += 1
        return head + body

    def messages(self, received: bytes) -> Iterator[tuple[int, int, list[bytes]]]:
        """Yields kind, request number and fields of each message that these bytes complete.

        Raises:
            ProtocolError: a frame is too large, damaged, out of order, or from a sender without the key.
        """
        self._buffer += received
        while len(self._buffer) >= _HEAD.size:
            length, mac = _HEAD.unpack_from(self._buffer)
            if not _BODY.size <= length <= MAX_FRAME_BYTES:
                raise ProtocolError(f"received a frame with the invalid length of {length} bytes")
            if len(self._buffer) < _HEAD.size + length:
                return
            body = bytes(self._buffer[_HEAD.size : _HEAD.size + length])
            del self._buffer[: _HEAD.size + length]
            if not hmac.compare_digest(mac, _frame_mac(self._receiving_key, self._num_received, body)):
                raise ProtocolError("received a frame with a wrong MAC")
            self._num_received += 1
            kind, request = _BODY.unpack_from(body)
            yield kind, request, _fields(body)


def batched_pairs(fields: Sequence[bytes]) -> Iterator[tuple[bytes, bytes]]:
    """Yields the fields in pairs, such as the number and the value of each rank.

    Raises:
        ValueError: the number of fields is odd.
    """
    return zip(fields[::2], fields[1::2], strict=True)


def _frame_mac(key: bytes, number: int, body: bytes) -> bytes:
    mac = hashlib.blake2s(number.to_bytes(8, "big"), key=key, digest_size=16)
    mac.update(body)
    return mac.digest()


def _fields(body: bytes) -> list[bytes]:
    fields, at = [], _BODY.size
    while at < len(body):
        if at + _LENGTH.size > len(body):
            raise ProtocolError("a frame has a field without a length")
        (length,) = _LENGTH.unpack_from(body, at)
        at += _LENGTH.size
        if at + length > len(body):
            raise ProtocolError("a frame has a field that is longer than the frame")
        fields.append(body[at : at + length])
        at += length
    return fields
