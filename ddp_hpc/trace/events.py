"""Events of a Chrome trace, streamed: no more than a few megabytes of text are held at a time.

The format: "Trace Event Format" of Chromium's catapult project, as libkineto writes it. Any writer will do:
the array of events may stand alone or under `traceEvents`, in one line or many.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from ddp_hpc.trace.chunks import unpacked

_BLOCK_BYTES = 8 << 20
_LONGEST_EVENT_BYTES = 256 << 20
_BETWEEN = re.compile(rb"(?<=\})\s*,\s*(?=\{)")
_END = re.compile(rb"\}\s*(?=\])")
_TAIL_BYTES = 1 << 16
_TRIES = 20


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


_EVENTS = msgspec.json.Decoder(list[Event])
_EVENT = msgspec.json.Decoder(Event)


def read_events(path: Path, reading: Reading) -> Iterator[list[Event]]:
    """The events of the file, some thousands at a time; `reading` is filled meanwhile.

    What cannot be read is left out and said in `reading.notes`: this never raises for a file's content.

    Raises:
        OSError: the file cannot be opened.
    """
    text = b""
    begun = False
    for block in unpacked(path, _BLOCK_BYTES, reading.notes):
        text += block
        if not begun:
            start = _begin(text, reading)
            if start is None:
                if len(text) > _LONGEST_EVENT_BYTES:
                    break
                continue
            text = text[start:]
            begun = True
        events, text = _take(text, reading)
        if events:
            yield events
        if len(text) > _LONGEST_EVENT_BYTES:
            reading.notes.append("an event of more than 256 MiB: read up to there")
            return
    if not begun:
        reading.notes.append("it holds no traceEvents" if text else "it is empty")
        return
    if events := _take_last(text, reading):
        yield events
    if reading.num_unreadable:
        reading.notes.append(f"{reading.num_unreadable} of its events could not be read")


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
    except (msgspec.DecodeError, RecursionError):
        reading.notes.append("the fields beside its events could not be read")
        return {}
    found.pop("traceEvents", None)
    return dict(found)


def _take(text: bytes, reading: Reading) -> tuple[list[Event], bytes]:
    """The events that are whole, and the text behind them."""
    cuts = [*_BETWEEN.finditer(text, max(0, len(text) - _TAIL_BYTES))] or [*_BETWEEN.finditer(text)]
    # A cut inside an event leaves a bracket or a string open: text that decodes was cut between two.
    for cut in reversed(cuts[-_TRIES:]):
        try:
            return _decode(text[: cut.start()], reading), text[cut.end() :]
        except msgspec.DecodeError:
            continue
    if not cuts:
        return [], text
    return _salvage(text[: cuts[-1].start()], reading), text[cuts[-1].end() :]


def _take_last(text: bytes, reading: Reading) -> list[Event]:
    """The events of the last piece, and the fields that follow the array."""
    stripped = text.strip()
    if stripped[:1] == b"]":  # all events were taken
        _trailer(stripped, reading)
        return []
    for mark in reversed([*_END.finditer(text)]):
        end = mark.end()
        try:
            events = _decode(text[:end], reading)
        except msgspec.DecodeError:
            continue
        _trailer(text[end:].strip(), reading)
        return events
    reading.notes.append("it is cut off: read up to there")
    ends = [mark.start() for mark in re.finditer(rb"\}", text)]
    for end in reversed(ends[-10 * _TRIES :]):
        try:
            return _decode(text[: end + 1], reading)
        except msgspec.DecodeError:
            continue
    return _salvage(text, reading)


def _trailer(text: bytes, reading: Reading) -> None:
    rest = text.removeprefix(b"]").strip().removeprefix(b",").strip()
    if rest not in (b"", b"}"):
        reading.head |= _fields(b"{" + rest, reading)
    elif not rest and reading.head:
        reading.notes.append("it is cut off behind its last event")


def _decode(text: bytes, reading: Reading) -> list[Event]:
    """Raises msgspec.DecodeError where the text is no JSON."""
    whole = b"[" + text + b"]"
    try:
        events = _EVENTS.decode(whole)
    except msgspec.ValidationError:  # JSON, but for instance a name that is a number
        pieces = msgspec.json.decode(whole, type=list[msgspec.Raw])
        events = [event for piece in pieces if (event := _one(piece, reading)) is not None]
    except UnicodeDecodeError:
        return _decode(text.decode("utf-8", "replace").encode(), reading)
    reading.num_events += len(events)
    return events


def _salvage(text: bytes, reading: Reading) -> list[Event]:
    """Of text that is no JSON: those events that are."""
    events = [event for piece in _BETWEEN.split(text) if (event := _one(piece, reading)) is not None]
    reading.num_events += len(events)
    return events


def _one(piece: bytes | msgspec.Raw, reading: Reading) -> Event | None:
    try:
        return _EVENT.decode(piece)
    except (msgspec.DecodeError, UnicodeDecodeError):
        reading.num_unreadable += 1
        return None
