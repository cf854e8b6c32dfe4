"""`python benchmarks/trace_device_oracle.py TRACE...`: compares memory, queue and occupancy with the report.

Like benchmarks/trace_oracle.py, this is another computation on the whole JSON without code of `ddp_hpc`:

- the peak of `Total Allocated` and of `Total Reserved` of each device in the `[memory]` events, and the
  innermost operator or annotation of the same thread at the first moment of the former
- for each moment of the steps, the kernels and copies of which the launch call has begun, but which have not
  started: the median of their number, and the share of the time in which it is 0
- the mean of `est. achieved occupancy %` over the kernels that begin in a step, weighted by their durations,
  unless the report says that it is unknown for most of them, and the share of kernels of which the name
  contains one of the words of tensor_core.py (torch_tb_profiler 0.4, kineto's tb_plugin), or the sign of a
  newer library
"""

from __future__ import annotations

import gzip
import json
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from trace_oracle import read, windows

WORDS = re.compile(
    "h884|s884|h1688|s1688|hmma|i8816|16816|dgrad_1x1_stride_2x2|first_layer_wgrad_kernel|conv1x1|conv2d_c1_k1"
    "|direct_group|xmma_implicit_gemm|xmma_sparse_conv|xmma_warp_specialized_implicit_gemm|xmma_gemm"
    "|compute_attn_ws|fp8\\w*::GemmKernel|xmma_sparse_gemm|c1688|nvjet|tensorop|wgmma|tensor[0-9]+x[0-9]+x[0-9]+|flash_fwd_kernel"
    "|flash_fwd_splitkv_kernel|flash_bwd_dq|FlashAttnFwd|FlashAttnBwd|fmhaSm[0-9]+|bmm_\\w*_t[0-9]+x[0-9]+x[0-9]+u"
)
FIELDS = {"occupancy": "est. achieved occupancy %"}
NUMBERS = ("queue_median", "queue_empty", "tensor_cores", *FIELDS)


def events_of(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        document = json.loads(file.read().decode("utf-8", "replace"), strict=False)
    return document if isinstance(document, list) else list(document["traceEvents"])


def memory(events: list[dict[str, Any]]) -> dict[tuple[int, int], tuple[int, int, str]]:
    of_device: dict[tuple[int, int], list[tuple[float, Any, int, int]]] = defaultdict(list)
    for event in events:
        args = event.get("args") or {}
        if event.get("name") == "[memory]" and "Total Allocated" in args:
            sizes = args["Total Allocated"], args.get("Total Reserved", 0)
            of_device[args["Device Type"], args["Device Id"]].append(
                (event["ts"], (event["pid"], event["tid"]), *sizes)
            )
    found = {}
    for device, own in of_device.items():
        most = max(allocated for *_, allocated, _ in own)
        at, thread = min((at, thread) for at, thread, allocated, _ in own if allocated == most)
        around = [
            (float(event["ts"]), -float(event["dur"]), str(event["name"]))
            for event in events
            if event.get("ph") == "X" and event.get("cat") in ("cpu_op", "user_annotation")
            and (event["pid"], event["tid"]) == thread and event["ts"] <= at < event["ts"] + event["dur"]
        ]  # fmt: skip
        found[device] = most, max(reserved for *_, reserved in own), max(around, default=(0, 0, ""))[2]
    return found


def queue(path: Path) -> dict[str, float]:
    trace = read(path)
    changes = [(start, 0, 1) for start, _ in windows(trace)] + [(end, 0, -1) for _, end in windows(trace)]
    for work in trace.work:
        if work.call and work.call[0] < work.start:
            changes += [(work.call[0], 1, 0), (work.start, -1, 0)]
    lasted: dict[int, float] = defaultdict(float)
    length = inside = 0
    before = 0.0
    for at, longer, entered in sorted(changes):
        lasted[length] += (at - before) * (inside > 0)
        before, length, inside = at, length + longer, inside + entered
    whole, passed = sum(lasted.values()), 0.0
    for median in sorted(lasted):
        passed += lasted[median]
        if passed >= whole / 2:
            break
    return {"queue_median": median, "queue_empty": lasted[0] / whole}


def kernels(events: list[dict[str, Any]], steps: list[tuple[float, float]]) -> dict[str, float]:
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for event in events:
        is_inside = event.get("ph") == "X" and any(a <= float(event["ts"]) < b for a, b in steps)
        if is_inside and str(event.get("cat")).lower() == "kernel":
            values = {"tensor_cores": float(WORDS.search(event["name"]) is not None)}
            args = event.get("args") or {}
            values |= {name: args[field] for name, field in FIELDS.items() if args.get(field, -1) >= 0}
            if args.get("shared memory", 0) > 49152:  # Kineto writes 0 for all of these
                values.pop("occupancy", None)
            for name, value in values.items():
                sums[name][0] += value * event["dur"]
                sums[name][1] += event["dur"]
    return {name: weighted / whole for name, (weighted, whole) in sums.items() if whole}


def main(paths: list[str]) -> None:
    from ddp_hpc.trace import kernel_tables
    from ddp_hpc.trace.summarize_run import read_capture

    if not paths or paths[0].startswith("-"):
        sys.exit(str(__doc__))
    worst, num_peaks, num_wrong = 0.0, 0, 0
    print(f"{'trace':44}{'':7}", *(f"{name:>14}" for name in NUMBERS))
    for path in map(Path, paths):
        events, capture = events_of(path), read_capture(path)
        (trace,) = capture.ranks
        want, got = kernels(events, windows(read(path))), {}
        if trace.launches:
            want |= queue(path)
            got |= vars(trace.launches)
        rows = kernel_tables.kinds(capture).rows if want else [{"kind": "all"}]
        (got_all,) = (row for row in rows if row["kind"] == "all")
        got |= got_all
        computing = [kernel for kernel in trace.kernels if not kernel.is_copy]
        with_cores_s = sum(kernel.total_s for kernel in computing if kernel.tensor_cores)
        got["tensor_cores"] = with_cores_s / (sum(kernel.total_s for kernel in computing) or 1.0)
        for name in NUMBERS:
            if name in want and "occupancy" in want and got[name] is not None:
                scale = 1.0 if name in ("queue_empty", "tensor_cores") else max(abs(want[name]), 1.0)
                worst = max(worst, abs(want[name] - float(got[name] or 0)) / scale)
        for who, each in (("oracle", want), ("report", got)):
            print(f"{path.name[:43]:44}{who:7}", *(f"{each.get(name) or 0:14.4f}" for name in NUMBERS))
        peaks = memory(events)
        mine = [(m.allocated_bytes, m.reserved_bytes, m.callers.split(" > ")[-1]) for m in trace.memory]
        mine = mine if peaks else []  # torch 1.9 records changes only
        is_wrong = sorted(mine) != sorted(peaks.values())
        num_peaks, num_wrong = num_peaks + len(peaks), num_wrong + is_wrong
        for peak in sorted(peaks.values()) if not is_wrong else [*sorted(peaks.values()), "report:", *mine]:
            print(f"{'':44}memory", peak)
    print(f"largest difference: {worst:.2%}; {num_peaks} peaks of memory, {num_wrong} traces with wrong ones")
    sys.exit(worst > 0.005 or num_wrong > 0)


if __name__ == "__main__":
    main(sys.argv[1:])
