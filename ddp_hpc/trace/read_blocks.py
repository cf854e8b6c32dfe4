"""Reads a trace file in blocks, decompressing it if necessary, up to the first error in the data."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

_READ_BYTES = 1 << 16
_GZIP = b"\x1f\x8b"


def unpacked(path: Path, block_bytes: int, cut_off: Callable[[str], None]) -> Iterator[bytes]:
    """Yields the contents of a file in blocks of about `block_bytes`, decompressed if it is gzipped.

    For a truncated or damaged file, the blocks end early and `cut_off` is called with the reason.

    Raises:
        OSError: the file cannot be opened.
    """
    with path.open("rb") as raw:
        file = gzip.GzipFile(fileobj=raw) if raw.read(2) == _GZIP else raw
        raw.seek(0)
        block = bytearray()
        try:
            while piece := file.read1(_READ_BYTES):
                block += piece
                if len(block) >= block_bytes:
                    yield bytes(block)
                    block.clear()
        except EOFError:
            cut_off("the gzip data is truncated; the events before the end were read")
        except (gzip.BadGzipFile, zlib.error) as error:
            reason = str(error).rsplit(": ", 1)[-1]
            cut_off(f"the gzip data is damaged ({reason}); the rest was not read")
        except OSError as error:
            cut_off(f"reading stopped after an error: {error.strerror}")
        if block:
            yield bytes(block)
