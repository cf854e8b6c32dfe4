"""Events of a Chrome trace, streamed: no more than a few megabytes of text are held at a time.

The format: "Trace Event Format" of Chromium's catapult project, as libkineto writes it. Any writer will do:
the array of events may stand alone or under `traceEvents`, in one line or many.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from ddp_hpc.trace.chunks import unpacked

_BLOCK_BYTES = 8 << 20
_NO_JSON = (msgspec.DecodeError, RecursionError)
"""The second for brackets in brackets by the thousand."""
_LONGEST_EVENT_BYTES = 256 << 20
_BETWEEN = re.compile(rb"(?<=\})\s*,\s*(?=\{)")
_END = re.compile(rb"\}\s*(?=\])")
_TAIL_BYTES = 1 << 16
_TRIES = 20
_SURELY_BROKEN_BYTES = 4 * _BLOCK_BYTES


class Event(msgspec.Struct, gc=False):
    """One event. `args` is left as text: most are never looked at."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    ts: float = 0.0
    """In microseconds, as `dur` is."""
    dur: float = 0.0
    pid: int | str | float = 0
    tid: int | str | float = 0
    args: msgspec.Raw = msgspec.Raw(b"{}")


@dataclass
class Reading:
    """What comes with the events: complete once all of them were taken."""

    head: dict[str, Any] = field(default_factory=dict)
    """The fields beside `traceEvents`."""
    notes: list[str] = field(default_factory=list)
    num_events: int = 0
    num_unreadable: int = 0


_Event = TypeVar("_Event")


def read_events(path: Path, reading: Reading) -> Iterator[list[Event]]:
    """The events of the file, some thousands at a time; `reading` is filled meanwhile.

    What cannot be read is left out and said in `reading.notes`: this never raises for a file's content.

    Raises:
        OSError: the file cannot be opened.
    """
    return _Reader(reading, Event).read(path)


def read_raw_events(path: Path, reading: Reading) -> Iterator[list[dict[str, Any]]]:
    """The same with all of their fields."""
    return _Reader(reading, dict[str, Any]).read(path)


class _Reader(Generic[_Event]):
    def __init__(self, reading: Reading, kind: type[_Event]) -> None:
        self._reading = reading
        self._events = msgspec.json.Decoder(list[kind])  # type: ignore[valid-type]  # known when it runs
        self._event = msgspec.json.Decoder(kind)

    def read(self, path: Path) -> Iterator[list[_Event]]:
        text = b""
        begun = False
        for block in unpacked(path, _BLOCK_BYTES, self._reading.notes):
            text += block
            if not begun:
                start = _begin(text, self._reading)
                if start is None:
                    if len(text) > _LONGEST_EVENT_BYTES:
                        break
                    continue
                text = text[start:]
                begun = True
            events, text = self._take(text)
            if events:
                yield events
            if len(text) > _LONGEST_EVENT_BYTES:
                self._reading.notes.append("an event of more than 256 MiB: read up to there")
                return
        if not begun:
            self._reading.notes.append("it holds no traceEvents" if text else "it is empty")
            return
        if events := self._take_last(text):
            yield events
        if self._reading.num_unreadable:
            self._reading.notes.append(f"{self._reading.num_unreadable} of its events could not be read")

    def _take(self, text: bytes) -> tuple[list[_Event], bytes]:
        """The events that are whole, and the text behind them."""
        cuts = [*_BETWEEN.finditer(text, max(0, len(text) - _TAIL_BYTES))] or [*_BETWEEN.finditer(text)]
        # A cut inside an event leaves a bracket or a string open: text that decodes was cut between two.
        for cut in reversed(cuts[-_TRIES:]):
            try:
                return self._decode(text[: cut.start()]), text[cut.end() :]
            except _NO_JSON:
                continue
        if len(text) < _SURELY_BROKEN_BYTES:  # an event that is not whole yet has cuts too, within
            return [], text
        return self._salvage(text[: cuts[-1].start()]), text[cuts[-1].end() :]

    def _take_last(self, text: bytes) -> list[_Event]:
        """The events of the last piece, and the fields that follow the array."""
        stripped = text.strip()
        if stripped[:1] == b"]":  # all events were taken
            _trailer(stripped, self._reading)
            return []
        for mark in reversed([*_END.finditer(text)][-10 * _TRIES :]):
            end = mark.end()
            try:
                events = self._decode(text[:end])
            except _NO_JSON:
                continue
            _trailer(text[end:].strip(), self._reading)
            return events
        marks = [*_END.finditer(text)]
        if marks and text.rstrip().endswith((b"}", b"]")):  # it has its end
            _trailer(text[marks[-1].end() :].strip(), self._reading)
            return self._salvage(text[: marks[-1].end()])
        self._reading.notes.append("it is cut off: read up to there")
        ends = [mark.start() for mark in re.finditer(rb"\}", text)]
        for end in reversed(ends[-10 * _TRIES :]):
            try:
                return self._decode(text[: end + 1])
            except _NO_JSON:
                continue
        return self._salvage(text)

    def _decode(self, text: bytes) -> list[_Event]:
        """Raises one of _NO_JSON where the text is none."""
        whole = b"[" + text + b"]"
        try:
            events = self._events.decode(whole)
        except msgspec.ValidationError:  # JSON, but for instance a name that is a number
            pieces = msgspec.json.decode(whole, type=list[msgspec.Raw])
            events = [event for piece in pieces if (event := self._one(piece)) is not None]
        except UnicodeDecodeError:
            return self._decode(text.decode("utf-8", "replace").encode())
        self._reading.num_events += len(events)
        return events

    def _salvage(self, text: bytes) -> list[_Event]:
        """Of text that is no JSON: those events that are."""
        pieces = [piece for piece in _BETWEEN.split(text) if b'"ph"' in piece]
        events = [event for piece in pieces if (event := self._one(piece)) is not None]
        self._reading.num_events += len(events)
        return events

    def _one(self, piece: bytes | msgspec.Raw) -> _Event | None:
        try:
            return self._event.decode(piece)
        except (*_NO_JSON, UnicodeDecodeError):
            self._reading.num_unreadable += 1
            return None


def _begin(text: bytes, reading: Reading) -> int | None:
    """Where the events begin, behind the bracket; None: not in what is here yet."""
    if text.lstrip()[:1] == b"[":
        return text.index(b"[") + 1
    key = re.search(rb'"traceEvents"\s*:\s*\[', text)
    if key is None:
        return None
    reading.head |= _fields(text[: key.start()] + b'"traceEvents":0}', reading)
    return key.end()


def _fields(text: bytes, reading: Reading) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(text.decode("utf-8", "replace").encode())
    except _NO_JSON:
        reading.notes.append("the fields beside its events could not be read")
        return {}
    found.pop("traceEvents", None)
    return dict(found)


def _trailer(text: bytes, reading: Reading) -> None:
    rest = text.removeprefix(b"]").strip().removeprefix(b",").strip()
    if rest not in (b"", b"}"):
        reading.head |= _fields(b"{" + rest, reading)
    elif not rest and reading.head:
        reading.notes.append("it is cut off behind its last event")
