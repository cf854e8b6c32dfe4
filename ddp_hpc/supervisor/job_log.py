"""Writes the supervisor's lines to the log of the job."""

from __future__ import annotations

import os
from contextlib import suppress


def say(line: str) -> None:
    """Writes a line to stdout."""
    _write(1, line)


def complain(line: str, kind: str = "error") -> None:
    """Writes an error or a warning to stderr."""
    _write(2, f"{kind}: {line}")


def _write(stream: int, line: str) -> None:
    # The log can be on a full disk, which must not prevent the requeue.
    with suppress(OSError):
        os.write(stream, f"{line}\n".encode("utf-8", "backslashreplace"))
