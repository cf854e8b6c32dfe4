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


def launch(number: int, at_us: float, name: str, kernel_us: float, ran_us: float, tid: int = 1) -> list[Any]:
    """The call of the runtime that launches a kernel, and the kernel."""
    call = event("cuda_runtime", "cudaLaunchKernel", at_us, 2, tid, correlation=number)
    return [call, event("kernel", name, kernel_us, ran_us, 7, correlation=number)]


def training() -> list[Any]:
    """Two operators of one thread that launch three kernels, and one operator of another thread."""
    return [
        annotation("ProfilerStep#3", 0, 1000),
        annotation("attention block", 10, 300),
        event("cpu_op", "aten::linear", 20, 100),
        event("cpu_op", "aten::addmm", 30, 50),
        *launch(1, 40, "sgemm", 100, 60),
        *launch(2, 70, "bias", 160, 5),
        event("cpu_op", "aten::relu", 140, 20),
        *launch(3, 145, "vectorized_elementwise_kernel", 200, 10),
        event("cpu_op", "aten::copy_", 0, 900, 2),
        *launch(4, 60, "direct_copy_kernel", 400, 20, 2),
        event("kernel", "sgemm", 600, 7, 7, correlation=99),
    ]


def write(
    path: Path,
    events: list[Any],
    rank: int | None = 0,
    size: int = 1,
    host: str = "node1",
    base_ns: int = BASE_NS,
    **info: Any,
) -> Path:
    head: dict[str, Any] = {"schemaVersion": 1, "host_name": host, "baseTimeNanoseconds": base_ns}
    if rank is not None:
        head["distributedInfo"] = {"backend": "gloo", "rank": rank, "world_size": size, **info}
    text = json.dumps({**head, "traceEvents": events}).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path
