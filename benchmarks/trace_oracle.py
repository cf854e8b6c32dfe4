"""`python benchmarks/trace_oracle.py TRACE...`: compares the report's times with another computation.

The other computation uses no code of `ddp_hpc`. It reads the whole trace as JSON, and divides each step with
sets of intervals, in which a moment that several events cover is counted once. A kernel belongs to the
innermost annotation or operator with the name of a region around the call that launched it, or to the
backward pass if a thread of autograd made this call. While nothing runs on the device, it waits for the event
that starts next: for the host until the call that launches this event begins, in the call until it returns,
and then for the device. docs/how-to/read-traces.md names public traces, and describes the parts of a step.
"""

from __future__ import annotations

import gzip
import itertools
import json
import re
import sys
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Spans = list[tuple[float, float]]
Thread = tuple[Any, Any]

PARTS = ("snapshot", "optimizer", "backward", "forward", "other")
"""The parts of computation. If kernels of several of them run at once, the moment belongs to the first."""
REGIONS = ("data", *PARTS[:-1])
CAUSES = ("idle_data", "idle_snapshot", "idle_host", "idle_launch", "idle_kernel", "idle_other")
COLUMNS = ("wall", "data", *PARTS, "comm_exposed", "comm_hidden", "memcpy", "idle", *CAUSES)

WORDS = {"forward": r"forward|fwd|FORWARD|Forward", "backward": r"backward|bwd|BACKWARD|Backward"}
LETTERS = {"forward": "F", "backward": "[BIW]"}
FORWARD = ("DistributedDataParallel.forward", "FullyShardedDataParallel.forward")
NODE = re.compile(r"autograd::engine::evaluate_function.*|\w+Backward\d*|torch::autograd::AccumulateGrad")
COLLECTIVE = re.compile(
    ".*(nccl|rccl|oneccl|multimem_all_reduce|(deep_ep|dpsk::ep)::(internode|intranode)::)", re.IGNORECASE
)
OLD = {"operator": "cpu_op", "memcpy": "gpu_memcpy", "memset": "gpu_memset", "runtime": "cuda_runtime"}
END = float("inf")


def union(spans: Iterable[tuple[float, float]]) -> Spans:
    merged: Spans = []
    for start, end in sorted(span for span in spans if span[0] < span[1]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def common(some: Spans, others: Spans) -> Spans:
    found, i, j = [], 0, 0
    while i < len(some) and j < len(others):
        start, end = max(some[i][0], others[j][0]), min(some[i][1], others[j][1])
        found += [(start, end)] if start < end else []
        i, j = (i + 1, j) if some[i][1] < others[j][1] else (i, j + 1)
    return found


def without(some: Spans, others: Spans) -> Spans:
    edges = [0.0, *(edge for span in others for edge in span), END]
    return common(some, list(zip(edges[::2], edges[1::2], strict=True)))


def length(spans: Spans) -> float:
    return sum(end - start for start, end in spans)


@dataclass(frozen=True)
class Work:
    """A kernel or a copy, and the call that launched it, if that was recorded."""

    start: float
    end: float
    kind: str
    call: tuple[float, float, Thread] | None
    is_earlier: bool = False
    """Whether it was launched before the recording: its correlation ID is less than those of all calls."""


@dataclass
class Trace:
    host: dict[Thread, list[tuple[float, float, str, str]]] = field(default_factory=lambda: defaultdict(list))
    work: list[Work] = field(default_factory=list)
    steps: Spans = field(default_factory=list)
    main: set[Thread] = field(default_factory=set)
    """The threads that mark the steps, or all threads."""


def region_of(name: str, category: str) -> str:
    word = name.strip("# ").partition("#")[0].strip().lower()
    if category == "cpu_op" and NODE.fullmatch(name):
        return "backward"
    if word in REGIONS:
        return word
    if word in ("enumerate(dataloader)", "dataloader", "data_load"):
        return "data"
    if word in ("optimizer.step", "optimizer.zero_grad", "zero_grad"):
        return "optimizer"
    if name in FORWARD or category == "python_function":
        return "forward"
    phases = [
        phase
        for phase, words in WORDS.items()
        if re.search(rf"(^|[^A-Za-z])({words})([^A-Za-z]|$)", name)
        or re.search(rf"\({LETTERS[phase]}\)|^PP:\d+{LETTERS[phase]}", name)
    ]
    return phases[0] if len(phases) == 1 and category != "cpu_op" else ""


def read(path: Path) -> Trace:
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        document = json.loads(file.read().decode("utf-8", "replace"), strict=False)
    trace, device, calls = Trace(), [], {}
    for event in document if isinstance(document, list) else document["traceEvents"]:
        if event.get("ph") != "X" or "ts" not in event:
            continue
        start, name, args = float(event["ts"]), str(event.get("name")), event.get("args") or {}
        end, thread = start + float(event.get("dur") or 0), (event.get("pid"), event.get("tid"))
        category = str(event.get("cat")).lower()
        category = OLD.get(category, category)
        is_module = category == "python_function" and name.startswith("nn.Module: ")
        if category in ("cpu_op", "user_annotation") or is_module:
            trace.host[thread].append((start, end, name, category))
        elif category in ("kernel", "gpu_memcpy", "gpu_memset", "mtia_ccp_events"):
            copies = category.startswith("gpu_mem") or name == "dma_request"
            kind = "memcpy" if copies else "comm" if COLLECTIVE.match(name) else "kernel"
            if name not in ("event_wait", "event_record"):
                device.append((start, end, kind, args.get("correlation")))
        elif category.endswith(("_runtime", "_driver")) and "correlation" in args:
            first = calls.setdefault(args["correlation"], (start, end, thread))
            calls[args["correlation"]] = min(first, (start, end, thread))
    first = min((number for number in calls if number >= 0), default=0)
    trace.work = [
        Work(start, end, kind, calls.get(number), isinstance(number, int) and 0 <= number < first)
        for start, end, kind, number in device
    ]
    mark_steps(trace)
    return trace


def mark_steps(trace: Trace) -> None:
    """Finds the steps: those of the profiler, else the times between the ends of Optimizer.step."""
    for prefix, least in (("ProfilerStep#", 1), ("Optimizer.step", 3)):
        marks = [
            (start, end, thread)
            for thread, events in trace.host.items()
            for start, end, name, _ in events
            if name.startswith(prefix)
        ]
        if len(marks) >= least:
            ends = sorted(end for _, end, _ in marks)
            between = list(itertools.pairwise(ends))
            trace.steps = sorted(mark[:2] for mark in marks) if least == 1 else between
            trace.main = {thread for _, _, thread in marks}
            return
    trace.main = set(trace.host)


def innermost(events: list[tuple[float, float, str, str]]) -> list[tuple[float, float, str]]:
    """Divides the time of a thread into pieces with the region of the innermost event that has one. A module
    counts as forward outside of other regions only.
    """
    own = [event for event in events if event[3] != "python_function"]
    marked = [(start, end, region) for start, end, *name in own if (region := region_of(*name))]
    modules = [event[:2] for event in events if event[3] == "python_function"]
    marked += [(*span, "forward") for span in without(union(modules), union(mark[:2] for mark in marked))]
    pieces: list[tuple[float, float, str]] = []
    around: list[tuple[float, float, str]] = []
    at = -END
    for start, end, region in [*sorted(marked, key=lambda mark: (mark[0], -mark[1])), (END, END, "")]:
        while around and around[-1][1] <= start:
            pieces.append((at, around[-1][1], around[-1][2]))
            at = max(at, around.pop()[1])
        if around:
            pieces.append((at, start, around[-1][2]))
        at = start
        around.append((start, end, region))
    return [piece for piece in pieces if piece[0] < piece[1]]


def windows(trace: Trace) -> Spans:
    """Returns the steps. On a device, one begins once all work that was launched before it has ended."""
    if not trace.work:
        times = [event[:2] for events in trace.host.values() for event in events]
        return trace.steps or [(min(start for start, _ in times), max(end for _, end in times))]
    if not trace.steps:
        return [(min(work.start for work in trace.work), max(work.end for work in trace.work))]
    launched = [(-END, work.end) for work in trace.work if work.is_earlier] + [
        (work.call[0] if work.call else work.start, work.end) for work in trace.work if not work.is_earlier
    ]
    done = [
        max((end for moment, end in launched if moment < start), default=-END) for start, _ in trace.steps
    ]
    begins = [max(begin, end) for (begin, _), end in zip(trace.steps, done, strict=True)]
    ends = [
        min(following, max(end, finished))
        for (_, end), following, finished in zip(
            trace.steps, [*begins[1:], END], [*done[1:], max(end for _, end in launched)], strict=True
        )
    ]
    return [(begin, max(begin, end)) for begin, end in zip(begins, ends, strict=True)]


def divide_device(
    trace: Trace, pieces: dict[Thread, list[tuple[float, float, str]]]
) -> list[dict[str, float]]:
    autograd = {thread for thread, events in trace.host.items() if any(is_node(event) for event in events)}
    autograd -= trace.main
    spans: dict[str, Spans] = defaultdict(list)
    regions: dict[Work, str] = {}
    for work in trace.work:
        region = ""
        if work.kind == "kernel" and work.call:
            moment, _, thread = work.call
            at = bisect_right(pieces.get(thread, []), (moment, END, "")) - 1
            region = "backward" if thread in autograd else ""
            if at >= 0 and pieces[thread][at][1] > moment:
                region = pieces[thread][at][2]
        regions[work] = region
    if "forward" not in regions.values():
        regions |= before_backward(trace, regions)
    for work, region in regions.items():
        part = region if region in PARTS else "other"
        spans[part if work.kind == "kernel" else work.kind].append((work.start, work.end))
    sets = {name: union(some) for name, some in spans.items()}
    computing = union(span for part in PARTS for span in sets.get(part, []))
    comm, copies = sets.get("comm", []), sets.get("memcpy", [])
    waits = {
        region: union(piece[:2] for thread in trace.main for piece in pieces[thread] if piece[2] == region)
        for region in ("data", "snapshot")
    }
    causes = gaps(trace.work, waits)
    rows = []
    for window in windows(trace):
        whole = [window]
        row = claim({part: common(sets.get(part, []), whole) for part in PARTS})
        row["comm_exposed"] = length(without(common(comm, whole), computing))
        row["comm_hidden"] = length(common(common(comm, whole), computing))
        row["memcpy"] = length(without(common(copies, whole), union(computing + comm)))
        row |= {cause: length(common(causes[cause], whole)) for cause in CAUSES}
        row["data"], row["snapshot"] = row["idle_data"], row["snapshot"] + row["idle_snapshot"]
        row["idle"] = sum(row[cause] for cause in CAUSES[2:])
        rows.append(row | {"wall": length(whole)})
    return rows


def before_backward(trace: Trace, regions: dict[Work, str]) -> dict[Work, str]:
    """Returns the work of a forward pass without annotation: what is launched outside of all regions in a
    step before its first kernel of the backward pass.
    """
    found: dict[Work, str] = {}
    for start, end in trace.steps:
        own = {
            work: region
            for work, region in regions.items()
            if work.kind == "kernel" and work.call and start <= work.call[0] < end
        }
        first = min(
            (work.call[0] for work, region in own.items() if work.call and region == "backward"),
            default=start,
        )
        found |= {
            work: "forward"
            for work, region in own.items()
            if work.call and not region and work.call[0] < first
        }
    return found


def gaps(works: list[Work], waits: dict[str, Spans]) -> dict[str, Spans]:
    """Returns the times in which the device does nothing, by cause."""
    found: dict[str, Spans] = {cause: [] for cause in CAUSES}
    reach = -END
    launch = {work: work.call[0] if work.call else work.start for work in works}
    end = Work(END, END, "", (END, END, (0, 0)))
    for work in [*sorted(works, key=lambda work: (work.start, launch[work])), end]:
        if work.start > reach:
            if work.call:
                launched = min(max(work.call[0], reach), work.start)
                returned = min(max(work.call[1], launched), work.start)
                found["idle_host"].append((reach, launched))
                found["idle_launch"].append((launched, returned))
                found["idle_kernel"].append((returned, work.start))
            else:
                found["idle_other"].append((reach, work.start))
        reach = max(reach, work.end)
    found = {cause: union(spans) for cause, spans in found.items()}
    for region in ("data", "snapshot"):
        found[f"idle_{region}"] = common(found["idle_host"], waits[region])
        found["idle_host"] = without(found["idle_host"], waits[region])
    return found


def is_node(event: tuple[float, float, str, str]) -> bool:
    return event[3] == "cpu_op" and NODE.fullmatch(event[2]) is not None


def claim(parts: dict[str, Spans]) -> dict[str, float]:
    """Returns the length of each part without the parts before it."""
    row, claimed = {}, []
    for part, spans in parts.items():
        row[part] = length(without(spans, claimed))
        claimed = union(claimed + spans)
    return row


def divide_host(trace: Trace, pieces: dict[Thread, list[tuple[float, float, str]]]) -> list[dict[str, float]]:
    regions: dict[str, Spans] = defaultdict(list)
    comm, computing = [], []
    for thread, events in trace.host.items():
        collectives = [event[:2] for event in events if event[2].startswith(("gloo:", "mpi:"))]
        comm += collectives
        if collectives and trace.main != set(trace.host) and thread not in trace.main:
            continue  # a thread of the communication library
        computing += [
            event[:2]
            for event in events
            if event[3] == "cpu_op" and not event[2].startswith(("c10d::", "record_param_comms"))
        ]
        for start, end, region in pieces[thread]:
            if thread in trace.main or region not in ("data", "snapshot"):
                regions[region].append((start, end))
        # Between two nodes, autograd is at work if the thread does nothing else.
        nodes, begun = union(event[:2] for event in events if is_node(event)), sorted(e[0] for e in events)
        for (_, end), (start, _) in itertools.pairwise(nodes):
            if begun[bisect_right(begun, end)] >= start:
                regions["backward"].append((end, start))
    exposed = without(union(comm), union(computing))
    sets = {"comm_exposed": exposed, "data": regions["data"]} | {part: regions[part] for part in PARTS[:-1]}
    sets["other"] = computing
    rows = []
    for window in windows(trace):
        row = claim({name: common(union(spans), [window]) for name, spans in sets.items()})
        row["idle"] = length([window]) - sum(row.values())
        row["comm_hidden"] = length(common(union(comm), [window])) - row["comm_exposed"]
        rows.append(row | {"wall": length([window])})
    return rows


def truth(path: Path) -> dict[str, float]:
    """Returns the mean time of each part of a step, in seconds."""
    trace = read(path)
    pieces = {thread: innermost(events) for thread, events in trace.host.items()}
    rows = (divide_device if trace.work else divide_host)(trace, pieces)
    return {name: sum(row.get(name, 0.0) for row in rows) / len(rows) * 1e-6 for name in COLUMNS}


def main(paths: list[str]) -> None:
    from ddp_hpc.trace.summarize_run import read_capture

    if not paths or paths[0].startswith("-"):
        sys.exit(str(__doc__))
    worst = 0.0
    print(f"{'trace':44}{'':7}", *(f"{name:>12}" for name in COLUMNS), "  ms per step")
    for path in map(Path, paths):
        want, times = truth(path), read_capture(path).mean
        got = {name: float(getattr(times, f"{name}_s")) for name in COLUMNS}
        off = max(abs(want[name] - got[name]) / want["wall"] for name in COLUMNS)
        worst = max(worst, off)
        for who, each in (("oracle", want), ("report", got)):
            print(f"{path.name[:43]:44}{who:7}", *(f"{each[name] * 1e3:12.3f}" for name in COLUMNS))
        print(f"{'':44}off by {off:.2%}")
    print(f"largest difference: {worst:.2%} of a step")
    sys.exit(worst > 0.02)


if __name__ == "__main__":
    main(sys.argv[1:])
