"""`python benchmarks/trace_oracle.py TRACE...`: compares the report's times with another computation.

The other computation uses no code of `ddp_hpc.trace`. It reads the whole trace as JSON, finds the launch of
each kernel by its correlation ID, and walks over all moments at which something starts or ends. A kernel
belongs to the innermost annotation or operator around its launch that names a region, or to the backward pass
if a thread of autograd launched it. While nothing runs, the device waits for the event that starts next:
between kernels if that was already launched, for data if the host is in its DataLoader, else for the host.
docs/how-to/read-traces.md names public traces of GPUs.
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
CAUSES = ("idle_data", "idle_host", "idle_kernel", "idle_other")
WORDS = {"optimizer": ("optimizer", "zero_grad"), "backward": ("backward", "autograd::engine::eval")}
WORDS |= {"forward": ("forward", "distributeddataparallel.forward", "fullyshardeddataparallel.forward")}


OLD = {"Operator": "cpu_op", "Kernel": "kernel", "Memcpy": "gpu_memcpy", "Memset": "gpu_memset"}
OLD["Runtime"] = "cuda_runtime"  # categories of torch before 1.11


def region_of(name: str) -> str | None:
    name = name.strip("# ").lower()
    for region, words in WORDS.items():
        if name.startswith(words) and (region != "forward" or name.split("#")[0].strip() in words):
            return region
    return None


Activity = tuple[float, float, float, str, bool]


def activities(events: list[dict[str, Any]]) -> list[Activity]:
    """Returns start, end, launch and kind of each device event, and whether its launch was recorded."""
    calls = {}
    spans = defaultdict(list)  # the regions of each thread
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
        elif any(word in event["name"].lower() for word in ("nccl", "multimem_all_reduce")):
            kind = "comm"
        found.append((start, start + event["dur"], launch, kind, thread is not None))
    return sorted(found)


def gaps(found: list[Activity], events: list[dict[str, Any]]) -> list[tuple[float, float, str]]:
    """Returns start, end and cause of the times in which the device did nothing."""
    data = [
        (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("ph") == "X"
        and event.get("cat") in ("user_annotation", "cpu_op")
        and event["name"].strip("# ").lower().split("#")[0] in ("data", "dataloader", "enumerate(dataloader)")
    ]
    idle, reach = [], float("-inf")
    for start, end, launch, _, known in sorted(found, key=lambda one: (one[0], one[2])):
        if start > reach:
            late = launch > reach
            idle.append((reach, start, "idle_other" if not known else "idle_host" if late else "idle_kernel"))
        reach = max(reach, end)
    split = []
    for begin, end, cause in [*idle, (reach, float("inf"), "idle_host")]:
        around = (
            sorted(one for one in data if one[0] < end and one[1] > begin) if cause != "idle_kernel" else []
        )
        for first, last in around:
            split.append((begin, max(begin, first), cause))
            split.append((max(begin, first), max(begin, min(last, end)), "idle_data"))
            begin = max(begin, min(last, end))
        split.append((begin, end, cause))
    return split


def idle_times(split: list[tuple[float, float, str]], steps: list[list[float]]) -> dict[str, float]:
    """Returns the mean idle time per step by cause, in milliseconds."""
    total: dict[str, float] = defaultdict(float)
    for begin, end, cause in split:
        for first, last in steps:
            total[cause] += max(0.0, min(end, last) - max(begin, first))
    return {cause: total[cause] / len(steps) * 1e-3 for cause in CAUSES}


def windows(events: list[dict[str, Any]], found: list[Activity]) -> list[list[float]]:
    """Returns the device's steps. Each begins once the host has begun it and all earlier work has ended."""
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


def divide(found: list[Activity], steps: list[list[float]]) -> dict[str, float]:
    """Returns the mean time per step of each part, in milliseconds."""
    total: dict[str, float] = defaultdict(float)
    changes = sorted([(one[0], 1, one[3]) for one in found] + [(one[1], -1, one[3]) for one in found])
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
    from ddp_hpc.trace.summarize_run import read_capture

    worst = 0.0
    columns = (*PARTS, *CAUSES)
    print(f"{'trace':44}{'':7}", *(f"{part:>12}" for part in columns), "  ms per step")
    for path in map(Path, paths):
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            events = json.load(file)["traceEvents"]
        for event in events:
            event["cat"] = OLD.get(event.get("cat"), event.get("cat"))
        found = activities(events)
        steps = windows(events, found)
        want = divide(found, steps) | idle_times(gaps(found, events), steps)
        times = read_capture(path).mean
        computing = ("forward_s", "backward_s", "optimizer_s", "snapshot_s", "other_s")
        got = {part: getattr(times, f"{part}_s") * 1e3 for part in columns if part != "compute"}
        got["compute"] = sum(getattr(times, name) for name in computing) * 1e3
        off = max(abs(want[part] - got[part]) / want["wall"] for part in columns)
        worst = max(worst, off)
        print(f"{path.name[:43]:44}{'oracle':7}", *(f"{want[part]:12.3f}" for part in columns))
        print(f"{'':44}{'report':7}", *(f"{got[part]:12.3f}" for part in columns), f"  off by {off:.2%}")
    print(f"largest difference: {worst:.2%} of a step")
    sys.exit(worst > 0.02)


if __name__ == "__main__":
    main(sys.argv[1:])
