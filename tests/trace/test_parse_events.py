"""Reading Chrome traces in all formats, including damaged ones, with notes on what could not be read."""

import gzip
import json

import pytest

from ddp_hpc.trace import parse_events, read_blocks
from ddp_hpc.trace.parse_events import Reading, read_events


def _event(number, **more):
    return {
        "ph": "X",
        "cat": "cpu_op",
        "name": f"op{number}",
        "ts": number * 10.0,
        "dur": 5.0,
        "pid": 1,
        "tid": 1,
        **more,
    }


EVENTS = [_event(i) for i in range(200)]
WHOLE = {"schemaVersion": 1, "baseTimeNanoseconds": 7, "traceEvents": EVENTS, "traceName": "x"}


def _read(path):
    reading = Reading()
    return [event for some in read_events(path, reading) for event in some], reading


@pytest.fixture(params=[8 << 20, 700], ids=["one block", "many blocks"])
def block_bytes(request, monkeypatch):
    monkeypatch.setattr(parse_events, "_BLOCK_BYTES", request.param)
    monkeypatch.setattr(parse_events, "_SURELY_BROKEN_BYTES", 20 * request.param)
    monkeypatch.setattr(read_blocks, "_READ_BYTES", min(request.param, 1 << 16))


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(WHOLE),
        json.dumps(WHOLE, indent=2),
        json.dumps(WHOLE, separators=(",", ":")),
        json.dumps({"traceEvents": EVENTS, "baseTimeNanoseconds": 7, "a": [{"b": 1}, {"c": [{}, {}]}]}),
        "\ufeff " + json.dumps(WHOLE),
    ],
    ids=["line", "indented", "dense", "fields behind", "byte order mark"],
)
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
@pytest.mark.usefixtures("block_bytes")
def test_every_event_and_field_of_a_whole_trace_is_read(tmp_path, text, packed):
    path = tmp_path / "trace.json"
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    found, reading = _read(path)
    assert [event.name for event in found] == [event["name"] for event in EVENTS]
    assert reading.head["baseTimeNanoseconds"] == 7
    assert (reading.notes, reading.num_events) == ([], 200)


@pytest.mark.usefixtures("block_bytes")
def test_a_bare_array_is_a_valid_trace(tmp_path):
    (tmp_path / "t.json").write_text(json.dumps(EVENTS))
    found, reading = _read(tmp_path / "t.json")
    assert (len(found), reading.notes) == (200, [])


@pytest.mark.usefixtures("block_bytes")
def test_names_that_look_like_the_end_of_an_event_are_harmless(tmp_path):
    hostile = ['}, {"ph"', "}]", '"traceEvents": [', "},\n  {", "\\", '"', "]}"]
    made = [
        _event(i, name=name, args={"a": [{"b": name}, {"c": name}]}) for i, name in enumerate(hostile * 9)
    ]
    (tmp_path / "t.json").write_text(json.dumps({"traceEvents": made}))
    found, reading = _read(tmp_path / "t.json")
    assert [event.name for event in found] == hostile * 9
    assert reading.notes == []


@pytest.mark.usefixtures("block_bytes")
def test_a_trace_truncated_anywhere_gives_the_events_before_the_cut(tmp_path):
    text = json.dumps(WHOLE, indent=1).encode()
    first = text.index(b'"ph"')
    for cut in range(first + 200, len(text) - 40, 1009):
        (tmp_path / "t.json").write_bytes(text[:cut])
        found, reading = _read(tmp_path / "t.json")
        whole = text[:cut].count(b"}")
        assert len(found) == whole, cut
        assert "the file is truncated; the events before the end were read" in reading.notes


def test_truncated_or_damaged_gzip_data_gives_the_events_before(tmp_path):
    many = [_event(i, args={"random": i * 7919 % 10007}) for i in range(30_000)]
    packed = gzip.compress(json.dumps({"traceEvents": many}).encode())
    (tmp_path / "cut.json.gz").write_bytes(packed[: len(packed) // 2])
    found, reading = _read(tmp_path / "cut.json.gz")
    assert 5_000 < len(found) < 25_000
    assert "the gzip data is truncated; the events before the end were read" in reading.notes
    broken = bytearray(packed)
    broken[len(packed) // 2] ^= 0xFF
    (tmp_path / "broken.json.gz").write_bytes(broken)
    found, reading = _read(tmp_path / "broken.json.gz")
    assert len(found) > 5_000
    assert any(note.startswith("the gzip data is damaged") for note in reading.notes)


def test_concatenated_gzip_files_are_read_as_one(tmp_path):
    text = json.dumps(WHOLE).encode()
    (tmp_path / "t.json.gz").write_bytes(gzip.compress(text[:999]) + gzip.compress(text[999:]))
    found, reading = _read(tmp_path / "t.json.gz")
    assert (len(found), reading.notes) == (200, [])


def test_invalid_utf8_is_replaced(tmp_path):
    text = json.dumps(WHOLE).encode().replace(b'"op7"', b'"op\xff\xfe"')
    (tmp_path / "t.json").write_bytes(text)
    found, reading = _read(tmp_path / "t.json")
    assert (found[7].name, len(found), reading.notes) == ("op\ufffd\ufffd", 200, [])


def test_invalid_events_are_counted(tmp_path):
    made = [*EVENTS[:3], {"ph": "X", "name": 5, "ts": "soon"}, *EVENTS[3:6]]
    text = json.dumps({"traceEvents": made}).replace('"op1"', '"op\n1"')
    (tmp_path / "t.json").write_text(text)
    found, reading = _read(tmp_path / "t.json")
    assert [event.name for event in found] == ["op0", "op2", "op3", "op4", "op5"]
    assert reading.notes == ["2 events could not be read"]


@pytest.mark.parametrize(
    ("content", "note"),
    [
        (b"", "the file is empty"),
        (b"<html>not found</html>", "no traceEvents found"),
        (b"{}", "no traceEvents found"),
        (b"\x1f\x8b", "the gzip data is truncated; the events before the end were read"),
        (b"\x00" * 1000, "no traceEvents found"),
        (b'{"traceEvents": [', "the file is truncated; the events before the end were read"),
    ],
)
def test_a_file_that_is_not_a_trace_gives_a_note(tmp_path, content, note):
    (tmp_path / "t.json").write_bytes(content)
    found, reading = _read(tmp_path / "t.json")
    assert found == []
    assert note in reading.notes


@pytest.mark.usefixtures("block_bytes")
def test_only_an_invalid_event_itself_is_skipped(tmp_path):
    text = json.dumps({"traceEvents": EVENTS, "traceName": "x"}).replace('"op50"', '"op\\q50"')
    (tmp_path / "t.json").write_text(text)
    found, reading = _read(tmp_path / "t.json")
    assert [event.name for event in found] == [f"op{i}" for i in range(200) if i != 50]
    assert reading.notes == ["1 event could not be read"]
    assert reading.head == {"traceName": "x"}


def test_only_an_event_with_too_many_nested_brackets_is_skipped(tmp_path):
    deep = '{"ph": "X", "name": "deep", "args": ' + "[" * 100_000 + "]" * 100_000 + "}"
    text = json.dumps({"traceEvents": [*EVENTS[:2], 0, *EVENTS[2:4]]}).replace(" 0,", f" {deep},")
    (tmp_path / "t.json").write_text(text)
    found, reading = _read(tmp_path / "t.json")
    assert [event.name for event in found] == ["op0", "op1", "op2", "op3"]
    assert reading.notes == ["1 event could not be read"]
