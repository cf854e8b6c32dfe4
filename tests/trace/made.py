"""Synthetic traces, for which the numbers of the report can be calculated by hand."""

import gzip
import json
from pathlib import Path
from typing import Any

BASE_NS = 1_790_857_026_000_000_000


def annotation(name: str, start_us: float, dur_us: float, tid: int = 1, **args: Any) -> dict[str, Any]:
    return event("user_annotation", name, start_us, dur_us, tid, **args)


def event(cat: str, name: str, start_us: float, dur_us: float, tid: int = 1, **args: Any) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "pid": 7,
        "tid": tid,
        "ts": start_us,
        "dur": dur_us,
        "args": args,
    }


def all_reduce(start_us: float, dur_us: float, num_floats: int = 1000, tid: int = 2) -> dict[str, Any]:
    dims = {"Input Dims": [[num_floats]], "Input type": ["float"]}
    return annotation("gloo:all_reduce", start_us, dur_us, tid, **dims)


def step(
    number: int, start_us: float, *, data: float = 10, forward: float = 100, wait: float = 40
) -> list[Any]:
    """A step with data, forward, 200 us of backward with an all_reduce in the last 50, and `wait` for it."""
    at = start_us
    begin_backward = at + data + forward
    end = begin_backward + 200 + wait
    return [
        annotation(f"ProfilerStep#{number}", at, end - at),
        annotation("data", at, data),
        annotation("forward", at + data, forward),
        event("cpu_op", "aten::mm", at + data, forward),
        annotation("backward", begin_backward, 200 + wait),
        event("cpu_op", "MmBackward", begin_backward, 200),
        all_reduce(begin_backward + 150, 50 + wait),
    ]


def write(
    path: Path,
    events: list[Any],
    rank: int | None = 0,
    size: int = 1,
    host: str = "node1",
    base_ns: int = BASE_NS,
) -> Path:
    head: dict[str, Any] = {"schemaVersion": 1, "host_name": host, "baseTimeNanoseconds": base_ns}
    if rank is not None:
        head["distributedInfo"] = {"backend": "gloo", "rank": rank, "world_size": size}
    text = json.dumps({**head, "traceEvents": events}).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path
