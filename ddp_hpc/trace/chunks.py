"""The bytes of a trace file, unpacked as they come: whatever can be read before the first fault."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_READ_BYTES = 1 << 16
"""Small, as what zlib had unpacked of the piece with the fault is lost."""
_GZIP = b"\x1f\x8b"
_BOM = b"\xef\xbb\xbf"


def unpacked(path: Path, block_bytes: int, notes: list[str]) -> Iterator[bytes]:
    """The file's content in blocks of about `block_bytes`, gunzipped where it is packed.

    A file that is cut off or broken ends early, and `notes` gets a sentence that says so.

    Raises:
        OSError: the file cannot be opened.
    """
    with path.open("rb") as file:
        pieces = _gunzipped(file, notes) if file.read(2) == _GZIP else _plain(file)
        file.seek(0)
        block: list[bytes] = []
        size = 0
        first = True
        try:
            for piece in pieces:
                block.append(piece.removeprefix(_BOM) if first else piece)
                first = False
                size += len(piece)
                if size >= block_bytes:
                    yield b"".join(block)
                    block.clear()
                    size = 0
        except OSError as error:
            notes.append(f"reading it ended with an error: {error.strerror}")
        if block:
            yield b"".join(block)


def _plain(file: BinaryIO) -> Iterator[bytes]:
    while piece := file.read(_READ_BYTES):
        yield piece


def _gunzipped(file: BinaryIO, notes: list[str]) -> Iterator[bytes]:
    unpacker = zlib.decompressobj(wbits=31)
    whole = True
    try:
        while packed := file.read(_READ_BYTES):
            while packed:
                whole = False
                # Bounded: a few packed bytes may stand for gigabytes.
                if piece := unpacker.decompress(packed, _READ_BYTES * 16):
                    yield piece
                packed = unpacker.unconsumed_tail
                if unpacker.eof:  # another member may follow, as `cat a.gz b.gz` makes them
                    packed = unpacker.unused_data
                    unpacker = zlib.decompressobj(wbits=31)
                    whole = True
    except zlib.error as error:
        notes.append(f"its gzip data is broken ({str(error).rsplit(': ', 1)[-1]}): read up to there")
        return
    if not whole:
        notes.append("its gzip data is cut off: read up to there")
