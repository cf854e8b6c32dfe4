"""What the clients and the server of the ranks' store send each other: a handshake, then frames.

Both sides prove in the handshake that they hold the job's key, without sending it: a challenge and
its HMAC (RFC 2104), the server first. A stranger learns nothing and can change nothing; one who only
passes bytes on between two ranks neither, as each frame carries a MAC with its number in the stream.
The content is not encrypted: addresses, counts and short JSON texts.

Standard library only: the server is a small process of its own, which starts before torch.
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
"""What the server sends first: the greeting and its nonce."""
RESPONSE_BYTES = 64
"""What the client answers: its nonce and its proof."""
PROOF_BYTES = 32
"""What the server answers: its own proof."""
MAX_FRAME_BYTES = 64 * 2**20

_HEAD = struct.Struct(">I16s")  # bytes of the body, its MAC
_BODY = struct.Struct(">BI")  # operation or status, number of the request
_LENGTH = struct.Struct(">I")


class Op(IntEnum):
    """What a client asks for; the fields of each request are in parentheses."""

    SET = 1  # (key, value)
    GET = 2  # (key, ...): answered with the values once all keys are there
    WAIT = 3  # (key, ...): answered once all keys are there
    CHECK = 4  # (key, ...)
    ADD = 5  # (key, number)
    COMPARE_SET = 6  # (key, expected, desired)
    DELETE = 7  # (key)
    APPEND = 8  # (key, value)
    COUNT = 9  # ()
    LIST = 10  # ()
    CANCEL = 11  # (): the request of this number is not waited for any more; not answered
    GOODBYE = 12  # (): what follows is not a failure


class Status(IntEnum):
    """How a request went."""

    DONE = 0
    REFUSED = 1  # (reason)


class ProtocolError(Exception):
    """The other side does not hold the key, or does not speak this protocol."""


def challenge(nonce: bytes) -> bytes:
    """The server's first bytes."""
    return GREETING + nonce


def response(key: bytes, server_nonce: bytes, client_nonce: bytes) -> bytes:
    """The client's answer to a challenge."""
    return client_nonce + _mac(key, b"client", server_nonce, client_nonce)


def server_proof(key: bytes, server_nonce: bytes, client_nonce: bytes) -> bytes:
    """The server's answer to a response that is right."""
    return _mac(key, b"server", server_nonce, client_nonce)


def is_response(key: bytes, server_nonce: bytes, received: bytes) -> bool:
    """Whether whoever sent this holds the key."""
    return hmac.compare_digest(received, response(key, server_nonce, received[:32]))


def stream_keys(key: bytes, server_nonce: bytes, client_nonce: bytes) -> tuple[bytes, bytes]:
    """The keys of one connection's frames: those of the client and those of the server."""
    return (
        _mac(key, b"frames of the client", server_nonce, client_nonce),
        _mac(key, b"frames of the server", server_nonce, client_nonce),
    )


def _mac(key: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, b"\0".join(parts), "sha256")


class FrameWriter:
    """Turns messages into the frames of one direction of a connection."""

    def __init__(self, key: bytes) -> None:
        self._key, self._number = key, 0

    def frame(self, kind: int, request: int, fields: Sequence[bytes]) -> bytes:
        """The next frame.

        Raises:
            ValueError: it would be larger than `MAX_FRAME_BYTES`.
        """
        body = b"".join(
            (
                _BODY.pack(kind, request),
                *(part for field in fields for part in (_LENGTH.pack(len(field)), field)),
            )
        )
        if len(body) > MAX_FRAME_BYTES:
            raise ValueError(f"{len(body)} bytes in one message; at most {MAX_FRAME_BYTES} are possible")
        head = _HEAD.pack(len(body), _frame_mac(self._key, self._number, body))
        self._number += 1
        return head + body


class FrameReader:
    """Puts the messages of one direction together again, from bytes in pieces of any size."""

    def __init__(self, key: bytes) -> None:
        self._key, self._number = key, 0
        self._buffer = bytearray()

    def messages(self, received: bytes) -> Iterator[tuple[int, int, list[bytes]]]:
        """Kind, request number and fields of each message that is complete with these bytes.

        Raises:
            ProtocolError: a frame is too large, damaged, out of order, or not of the key's holder.
        """
        self._buffer += received
        while len(self._buffer) >= _HEAD.size:
            length, mac = _HEAD.unpack_from(self._buffer)
            if not _BODY.size <= length <= MAX_FRAME_BYTES:
                raise ProtocolError(f"a frame of {length} bytes")
            if len(self._buffer) < _HEAD.size + length:
                return
            body = bytes(self._buffer[_HEAD.size : _HEAD.size + length])
            del self._buffer[: _HEAD.size + length]
            if not hmac.compare_digest(mac, _frame_mac(self._key, self._number, body)):
                raise ProtocolError("a frame with a wrong MAC")
            self._number += 1
            kind, request = _BODY.unpack_from(body)
            yield kind, request, _fields(body)


def _frame_mac(key: bytes, number: int, body: bytes) -> bytes:
    mac = hashlib.blake2s(number.to_bytes(8, "big"), key=key, digest_size=16)
    mac.update(body)
    return mac.digest()


def _fields(body: bytes) -> list[bytes]:
    fields, at = [], _BODY.size
    while at < len(body):
        if at + _LENGTH.size > len(body):
            raise ProtocolError("a field without a length")
        (length,) = _LENGTH.unpack_from(body, at)
        at += _LENGTH.size
        if at + length > len(body):
            raise ProtocolError("a field that is longer than its frame")
        fields.append(body[at : at + length])
        at += length
    return fields
