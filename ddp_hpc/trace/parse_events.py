"""Streams the events of a Chrome trace, with no more than a few megabytes of text in memory.

The format is the "Trace Event Format" of Chromium's catapult project as written by libkineto. Traces of
other programs are read too: the array of events may be the whole document or the value of `traceEvents`,
in one line or many.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from ddp_hpc.base.units import counted
from ddp_hpc.trace.read_blocks import unpacked

# Larger blocks do not fit into the cache of a core: 8 MiB is 15 % slower.
_BLOCK_BYTES = 1 << 20
_NO_JSON = (msgspec.DecodeError, RecursionError)
"""The errors for invalid JSON; RecursionError is raised for thousands of nested brackets."""
_LONGEST_EVENT_BYTES = 256 << 20
_BETWEEN = re.compile(rb"(?<=\})\s*,\s*(?=\{)")
_END = re.compile(rb"(?<=\})\s*(?=\])")
_END_OF_EVENT = re.compile(rb"(?<=\})")
_TAIL_BYTES = 1 << 16
_TRIES = 20
_SURELY_BROKEN_BYTES = 32 << 20


class Event(msgspec.Struct, gc=False):
    """One event. `args` is not decoded, since most of them are not needed."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    ts: float = 0.0
    """Start in microseconds."""
    dur: float = 0.0
    """Duration in microseconds."""
    pid: int | str | float = 0
    tid: int | str | float = 0
    args: msgspec.Raw = msgspec.Raw(b"{}")


@dataclass
class Reading:
    """Metadata and statistics of a trace, which are complete after all events have been read."""

    head: dict[str, Any] = field(default_factory=dict)
    """The fields other than `traceEvents`."""
    notes: list[str] = field(default_factory=list)
    num_events: int = 0
    num_unreadable: int = 0
    is_cut_off: bool = False
    """Whether the end of the file is missing or could not be read."""

    def cut_off(self, note: str) -> None:
        """Adds a note that the end of the file is missing or could not be read."""
        self.is_cut_off = True
        self.notes.append(note)


def read_events(path: Path, reading: Reading, kind: Any = Event) -> Iterator[list[Any]]:
    """Yields the events of the file, some thousands at a time, and fills `reading`.

    Unreadable parts are skipped and described in `reading.notes`; invalid contents never raise. The events
    have all of their fields if `kind` is a dictionary.

    Raises:
        OSError: the file cannot be opened.
    """
    return _Reader(reading, kind).read(path)


class _Reader:
    def __init__(self, reading: Reading, kind: Any) -> None:
        self._reading = reading
        self._events = msgspec.json.Decoder(list[kind])
        self._event = msgspec.json.Decoder(kind)

    def read(self, path: Path) -> Iterator[list[Any]]:
        text, begun, least_bytes = b"", False, 0
        for block in unpacked(path, _BLOCK_BYTES, self._reading.cut_off):
            text += block
            if len(text) < least_bytes:
                continue
            # An event that is larger than a block would otherwise be parsed again with each block.
            least_bytes = min(2 * len(text), _LONGEST_EVENT_BYTES)
            if not begun:
                text = text.removeprefix(b"\xef\xbb\xbf")  # a byte order mark
                start = _begin(text, self._reading)
                if start is None:
                    if len(text) > _LONGEST_EVENT_BYTES:
                        break
                    continue
                text = text[start:]
                begun = True
            events, text = self._take(text)
            if events:
                least_bytes = 0
                yield events
            if len(text) > _LONGEST_EVENT_BYTES:
                self._reading.cut_off("an event exceeds 256 MiB; the rest was not read")
                return
        if not begun:
            self._reading.notes.append("no traceEvents found" if text else "the file is empty")
            return
        if events := self._take_last(text):
            yield events
        if self._reading.num_unreadable:
            self._reading.notes.append(f"{counted(self._reading.num_unreadable, 'event')} could not be read")

    def _take(self, text: bytes) -> tuple[list[Any], bytes]:
        """Returns the complete events, and the text after them."""
        cuts = [*_BETWEEN.finditer(text, max(0, len(text) - _TAIL_BYTES))] or [*_BETWEEN.finditer(text)]
        if found := self._decode_before(text, cuts):
            events, end = found
            return events, text[end:]
        # The cuts may be inside an event that is not complete yet.
        if not cuts or len(text) < _SURELY_BROKEN_BYTES:
            return [], text
        return self._salvage(text[: cuts[-1].start()]), text[cuts[-1].end() :]

    def _take_last(self, text: bytes) -> list[Any]:
        """Returns the events of the last piece, and reads the fields that follow the array."""
        ends = [*_END.finditer(text)]
        is_empty = text.lstrip()[:1] == b"]"  # all events have been returned
        found = ([], 0) if is_empty else self._decode_before(text, ends)
        if found is None and ends and text.rstrip().endswith((b"}", b"]")):  # the file is not truncated
            found = self._salvage(text[: ends[-1].start()]), ends[-1].end()
        if found is not None:
            events, end = found
            _trailer(text[end:].strip(), self._reading)
            return events
        self._reading.cut_off("the file is truncated; the events before the end were read")
        found = self._decode_before(text, [*_END_OF_EVENT.finditer(text)])
        return found[0] if found else self._salvage(text)

    def _decode_before(self, text: bytes, cuts: list[re.Match[bytes]]) -> tuple[list[Any], int] | None:
        """Returns the events before the last cut that is not inside an event, and the offset behind this cut.

        A cut inside an event leaves a bracket or a string open, so text before it cannot be decoded.
        """
        for cut in reversed(cuts[-_TRIES:]):
            try:
                return self._decode(text[: cut.start()]), cut.end()
            except _NO_JSON:
                continue
        return None

    def _decode(self, text: bytes) -> list[Any]:
        """Decodes events; raises one of _NO_JSON if the text is not valid JSON."""
        whole = b"[" + text + b"]"
        try:
            events = self._events.decode(whole)
        except msgspec.ValidationError:  # valid JSON, but with an invalid field, such as a number as the name
            pieces = msgspec.json.decode(whole, type=list[msgspec.Raw])
            events = [event for piece in pieces if (event := self._decode_one(piece)) is not None]
        except UnicodeDecodeError:
            return self._decode(text.decode("utf-8", "replace").encode())
        self._reading.num_events += len(events)
        return events

    def _salvage(self, text: bytes) -> list[Any]:
        """Returns the valid events in text that is not valid JSON as a whole."""
        pieces = [piece for piece in _BETWEEN.split(text) if b'"ph"' in piece]
        events = [event for piece in pieces if (event := self._decode_one(piece)) is not None]
        self._reading.num_events += len(events)
        return events

    def _decode_one(self, piece: bytes | msgspec.Raw) -> Any | None:
        try:
            return self._event.decode(piece)
        except (*_NO_JSON, UnicodeDecodeError):
            self._reading.num_unreadable += 1
            return None


def _begin(text: bytes, reading: Reading) -> int | None:
    """Returns the offset of the first event, or None if the text does not contain the array yet."""
    if text.lstrip()[:1] == b"[":
        return text.index(b"[") + 1
    key = re.search(rb'"traceEvents"\s*:\s*\[', text)
    if key is None:
        return None
    reading.head |= _fields(text[: key.start()] + b'"traceEvents":0}', reading)
    return key.end()


def _fields(text: bytes, reading: Reading) -> dict[str, Any]:
    try:
        fields = msgspec.json.decode(text.decode("utf-8", "replace").encode())
    except _NO_JSON:
        reading.notes.append("the metadata could not be read")
        return {}
    fields.pop("traceEvents", None)
    return dict(fields)


def _trailer(text: bytes, reading: Reading) -> None:
    rest = text.removeprefix(b"]").strip().removeprefix(b",").strip()
    if rest not in (b"", b"}"):
        reading.head |= _fields(b"{" + rest, reading)
    elif not rest and reading.head:
        reading.cut_off("the file is truncated after its last event")
