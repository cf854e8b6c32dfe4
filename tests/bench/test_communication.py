"""The share of communication in synthetic traces, whose times are in microseconds."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from ddp_hpc.bench.scaling.results import communication_share

MAIN, GLOO, STREAM = 1, 2, 7


def event(name: str, cat: str, tid: int, begin: float, end: float) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": cat, "tid": tid, "ts": begin, "dur": end - begin}


def op(begin: float, end: float, name: str = "aten::mm") -> dict[str, Any]:
    return event(name, "cpu_op", MAIN, begin, end)


def gloo(begin: float, end: float, tid: int = GLOO) -> dict[str, Any]:
    return event("gloo:all_reduce", "user_annotation", tid, begin, end)


STEPS = [event(f"ProfilerStep#{i}", "user_annotation", MAIN, 100 * i, 100 * i + 100) for i in (1, 2)]


def write(directory: Path, *events: dict[str, Any], rank: int = 0) -> Path:
    path = directory / "trace" / f"rank{rank:05d}-of-00002.json.gz"
    path.parent.mkdir(exist_ok=True)
    marks = [{"ph": "M", "name": "thread_name", "tid": 1}, {"ph": "i", "name": "[memory]", "ts": 3}]
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": [*marks, *STEPS, *events]}).encode()))
    return path


def test_only_exposed_communication_counts(tmp_path: Path) -> None:
    write(tmp_path, op(100, 150), gloo(120, 160), op(190, 210), gloo(180, 220))
    assert communication_share(tmp_path) == pytest.approx((10 + 10 + 10) / 200)


def test_the_share_is_the_mean_over_the_traced_ranks(tmp_path: Path) -> None:
    """Waiting for another rank counts as communication."""
    write(tmp_path, gloo(120, 160))
    write(tmp_path, gloo(120, 220), rank=1)
    assert communication_share(tmp_path) == pytest.approx((40 + 100) / 2 / 200)


def test_without_a_trace_or_known_collectives_the_share_is_unknown(tmp_path: Path) -> None:
    assert communication_share(tmp_path) is None
    write(tmp_path, op(100, 200))
    assert communication_share(tmp_path) is None


# The time in gzip's header would make other names of tests in each of xdist's processes.
@pytest.mark.parametrize(
    "content",
    [b"", b"no gzip", gzip.compress(b"[1"), gzip.compress(b'{"traceEvents": [1]}')],
    ids=["empty", "no gzip", "cut JSON", "no events"],
)
def test_a_damaged_trace_is_skipped(tmp_path: Path, content: bytes) -> None:
    write(tmp_path, rank=1).write_bytes(content)
    assert communication_share(tmp_path) is None
    write(tmp_path, gloo(120, 160))
    assert communication_share(tmp_path) == pytest.approx(40 / 200)
