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


def kernel(name: str, begin: float, end: float) -> dict[str, Any]:
    return event(name, "kernel", STREAM, begin, end)


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


def test_concurrent_collectives_count_once(tmp_path: Path) -> None:
    write(tmp_path, gloo(120, 160), gloo(130, 180, tid=3), gloo(180, 185))
    assert communication_share(tmp_path) == pytest.approx(65 / 200)


def test_operators_of_the_backend_do_not_hide_communication(tmp_path: Path) -> None:
    own = event("aten::add_", "cpu_op", GLOO, 120, 160)
    write(tmp_path, gloo(120, 160), op(118, 162, "c10d::allreduce_"), own)
    assert communication_share(tmp_path) == pytest.approx(40 / 200)


def test_time_outside_steps_does_not_count(tmp_path: Path) -> None:
    write(tmp_path, gloo(50, 110), gloo(290, 400))
    assert communication_share(tmp_path) == pytest.approx(20 / 200)


def test_on_a_gpu_only_computing_kernels_hide_communication(tmp_path: Path) -> None:
    nccl = kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 120, 180)
    copy = event("Memcpy HtoD", "gpu_memcpy", STREAM, 170, 175)
    write(tmp_path, nccl, kernel("sgemm", 100, 150), copy, op(100, 300), gloo(100, 300))
    assert communication_share(tmp_path) == pytest.approx(30 / 200)


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


def test_a_truncated_trace_is_skipped(tmp_path: Path) -> None:
    path = write(tmp_path, gloo(120, 160))
    path.write_bytes(path.read_bytes()[:-20])
    assert communication_share(tmp_path) is None
