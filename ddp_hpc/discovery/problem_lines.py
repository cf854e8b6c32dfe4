"""Finds the warnings and errors in the output of a program."""

from __future__ import annotations

import re

_MAX_LINE_BYTES = 2048
_MAX_TRACEBACK_BYTES = 64 * 1024
# 442,649 lines of 3,072 ranks, 144 of each rank, have ended a job on Aurora.
MAX_LINES = 20
_LABEL_OF_TORCH = re.compile(rb"^\[rank[0-9]+\]: ?")
_TRACEBACK = b"Traceback (most recent call last)"
_CHAINED = (b"the direct cause of the following exception:", b"another exception occurred:")
_PROBLEM = re.compile(
    rb"(?:[Ee]rror|[Ww]arning|[Ee]xception): |\b(?:ERROR|WARN|WARNING|FATAL|CRITICAL)\b|"
    rb"Segmentation fault|terminate called|core dumped"
)


class ProblemLines:
    """Finds the lines with warnings and errors in one stream, whose parts are passed to `new`.

    Of a traceback, only the line with the exception counts: it is one line, instead of 30 from each rank.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._last_text = b""
        self._is_in_traceback = False
        self._traceback = bytearray()
        self.exception = ""
        """The last line of the last traceback, such as `ValueError: bad width`."""

    @property
    def traceback(self) -> str:
        """The output from the last traceback on; empty without one."""
        return self._traceback.decode("utf-8", "replace")

    def new(self, chunk: bytes) -> list[bytes]:
        """Returns the lines with warnings and errors that this part of the output completes."""
        *lines, rest = (self._rest + chunk).split(b"\n")
        self._rest = rest[-_MAX_LINE_BYTES:]
        # A progress bar overwrites its line.
        visible = [line.rstrip(b"\r").rpartition(b"\r")[2] for line in lines]
        return [line[:_MAX_LINE_BYTES] for line in visible if self._is_problem(line)]

    def _is_problem(self, labelled: bytes) -> bool:
        line = _LABEL_OF_TORCH.sub(b"", labelled)
        begins = _TRACEBACK in line
        if begins and not self._last_text.endswith(_CHAINED):
            self._traceback.clear()
        if (begins or self._traceback) and len(self._traceback) < _MAX_TRACEBACK_BYTES:
            self._traceback += line[:_MAX_LINE_BYTES] + b"\n"
        self._last_text = line.rstrip() or self._last_text
        was_in_traceback = self._is_in_traceback
        self._is_in_traceback = begins or (was_in_traceback and line[:1] in (b" ", b"\t", b""))
        if self._is_in_traceback:
            return False
        if was_in_traceback:
            self.exception = line[:_MAX_LINE_BYTES].decode("utf-8", "replace")
        return was_in_traceback or bool(_PROBLEM.search(line))
