"""Reads a trace file in blocks, decompressing it if necessary, up to the first error in the data."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

_READ_BYTES = 1 << 16
"""The size is small because zlib discards everything that it decompressed from a damaged block."""
_GZIP = b"\x1f\x8b"
_BOM = b"\xef\xbb\xbf"


def unpacked(path: Path, block_bytes: int, cut_off: Callable[[str], None]) -> Iterator[bytes]:
    """Yields the contents of a file in blocks of about `block_bytes`, decompressed if it is gzipped.

    For a truncated or damaged file, the blocks end early and `cut_off` is called with the reason.

    Raises:
        OSError: the file cannot be opened.
    """
    with path.open("rb") as file:
        pieces = _gunzipped(file, cut_off) if file.read(2) == _GZIP else _plain(file)
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
            cut_off(f"reading stopped after an error: {error.strerror}")
        if block:
            yield b"".join(block)


def _plain(file: BinaryIO) -> Iterator[bytes]:
    while piece := file.read(_READ_BYTES):
        yield piece


def _gunzipped(file: BinaryIO, cut_off: Callable[[str], None]) -> Iterator[bytes]:
    unpacker = zlib.decompressobj(wbits=31)
    whole = True
    try:
        while packed := file.read(_READ_BYTES):
            while packed:
                whole = False
                # The output is limited, because a few compressed bytes may expand to gigabytes.
                if piece := unpacker.decompress(packed, _READ_BYTES * 16):
                    yield piece
                packed = unpacker.unconsumed_tail
                if unpacker.eof:  # another member may follow, as in the output of `cat a.gz b.gz`
                    packed = unpacker.unused_data
                    unpacker = zlib.decompressobj(wbits=31)
                    whole = True
    except zlib.error as error:
        cut_off(f"the gzip data is damaged ({str(error).rsplit(': ', 1)[-1]}); the rest was not read")
        return
    if not whole:
        cut_off("the gzip data is truncated; the events before the end were read")
