"""`python benchmarks/trace_oracle.py TRACE...`: the report's times beside an independent computation.

The computation uses no code of `ddp_hpc.trace`. It reads the whole trace as JSON, finds the launch of each
kernel by its correlation ID, and walks over all moments at which something starts or ends. A kernel belongs
to the innermost annotation or operator around its launch that names a region, or to the backward pass if a
thread of autograd launched it. docs/reference/report.md lists public repositories with traces of GPUs.
"""

from __future__ import annotations

import gzip
import json
import sys
from bisect import bisect_right
from collections import defaultdict
from pathlib import Path
from typing import Any

PARTS = ("wall", "compute", "forward", "backward", "optimizer", "comm_exposed", "comm_hidden", "memcpy")
WORDS = {"optimizer": ("optimizer", "zero_grad"), "backward": ("backward", "autograd::engine::eval")}
WORDS |= {"forward": ("forward", "distributeddataparallel.forward", "fullyshardeddataparallel.forward")}


def region_of(name: str) -> str | None:
    name = name.strip("# ").lower()
    for region, words in WORDS.items():
        if name.startswith(words) and (region != "forward" or name.split("#")[0].strip() in words):
            return region
    return None


def activities(events: list[dict[str, Any]]) -> list[tuple[float, float, float, str]]:
    """Start, end, launch and kind of all that the device did."""
    calls = {}
    spans = defaultdict(list)  # of each thread: the regions
    autograd, main = set(), set()
    for event in events:
        category, thread = str(event.get("cat")), (event.get("pid"), event.get("tid"))
        if category.endswith(("_runtime", "_driver")):
            calls.setdefault(event.get("args", {}).get("correlation"), (thread, event["ts"]))
        elif category in ("cpu_op", "user_annotation") and event.get("ph") == "X":
            if region := region_of(event["name"]):
                spans[thread].append((event["ts"], event["ts"] + event["dur"], region))
            if event["name"].startswith("autograd::engine::eval"):
                autograd.add(thread)
            if event["name"].startswith("ProfilerStep#"):
                main.add(thread)
    found = []
    for event in events:
        if event.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        start = event["ts"]
        thread, launch = calls.get(event["args"].get("correlation"), (None, start))
        around = [span for span in spans.get(thread, ()) if span[0] <= launch < span[1]]
        kind = min(around, key=lambda span: span[1] - span[0])[2] if around else "other"
        if not around and main and thread in autograd - main:
            kind = "backward"
        if event["cat"] != "kernel":
            kind = "memcpy"
        elif "nccl" in event["name"].lower():
            kind = "comm"
        found.append((start, start + event["dur"], launch, kind))
    return sorted(found)


def windows(events: list[dict[str, Any]], found: list[tuple[float, float, float, str]]) -> list[list[float]]:
    """The device's steps: each begins when the host has begun it and all launched before has finished."""
    steps = sorted(
        (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("ph") == "X"
        and str(event.get("name")).startswith("ProfilerStep#")
        and event.get("cat") != "gpu_user_annotation"
    )
    if not steps:
        host = [e for e in events if e.get("ph") == "X" and e.get("cat") in ("cpu_op", "user_annotation")]
        times = [(e["ts"], e["ts"] + e["dur"]) for e in host] + [one[:2] for one in found]
        return [[min(one[0] for one in times), max(one[1] for one in times)]]
    made: list[list[float]] = []
    for number, (begin, end) in enumerate(steps):
        after = steps[number + 1][0] if number + 1 < len(steps) else float("inf")
        begin = max([begin, *(one[1] for one in found if one[2] < begin)])
        last = max([end, *(one[1] for one in found if one[2] < after)])
        made.append([max(begin, made[-1][1]) if made else begin, last])
    nexts = [*(begin for begin, _ in made[1:]), float("inf")]
    return [[begin, min(end, after)] for (begin, end), after in zip(made, nexts, strict=True)]


def divide(found: list[tuple[float, float, float, str]], steps: list[list[float]]) -> dict[str, float]:
    """The mean time per step of each part, in milliseconds."""
    total: dict[str, float] = defaultdict(float)
    changes = sorted([(s, 1, k) for s, _, _, k in found] + [(e, -1, k) for _, e, _, k in found])
    changes += [(edge, 0, "") for step in steps for edge in step]
    running: dict[str, int] = defaultdict(int)
    starts = [step[0] for step in steps]
    before = None
    for moment, change, kind in sorted(changes):
        if before is not None and moment > before:
            at = bisect_right(starts, before) - 1
            if at >= 0 and before < steps[at][1]:
                now = {name for name, number in running.items() if number}
                kernels = now - {"comm", "memcpy"}
                region = next((r for r in ("optimizer", "backward", "forward") if r in kernels), None)
                names = ["wall", *(["compute"] if kernels else []), *([region] if region else [])]
                if "comm" in now:
                    names.append("comm_hidden" if kernels else "comm_exposed")
                elif "memcpy" in now and not kernels:
                    names.append("memcpy")
                for name in names:
                    total[name] += moment - before
        running[kind] += change
        before = moment
    return {part: total[part] / len(steps) * 1e-3 for part in PARTS}


def main(paths: list[str]) -> None:
    from ddp_hpc.trace.capture import read_capture

    worst = 0.0
    print(f"{'trace':44}{'':7}", *(f"{part:>12}" for part in PARTS), "  ms per step")
    for path in map(Path, paths):
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            events = json.load(file)["traceEvents"]
        found = activities(events)
        want = divide(found, windows(events, found))
        times = read_capture(path).mean
        computing = ("forward_s", "backward_s", "optimizer_s", "snapshot_s", "other_s")
        got = {part: getattr(times, f"{part}_s") * 1e3 for part in PARTS if part != "compute"}
        got["compute"] = sum(getattr(times, name) for name in computing) * 1e3
        off = max(abs(want[part] - got[part]) / want["wall"] for part in PARTS)
        worst = max(worst, off)
        print(f"{path.name[:43]:44}{'oracle':7}", *(f"{want[part]:12.3f}" for part in PARTS))
        print(f"{'':44}{'report':7}", *(f"{got[part]:12.3f}" for part in PARTS), f"  off by {off:.2%}")
    print(f"largest difference: {worst:.2%} of a step")
    sys.exit(worst > 0.02)


if __name__ == "__main__":
    main(sys.argv[1:])
