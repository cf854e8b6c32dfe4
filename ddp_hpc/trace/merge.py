"""All ranks' traces in one file on one clock, for Perfetto."""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

import msgspec

from ddp_hpc.errors import DdpHpcError
from ddp_hpc.partial_files import partial_file
from ddp_hpc.trace.events import Reading, read_raw_events
from ddp_hpc.trace.model import RankTrace

_LEFT_OUT = ("python_function", "cpu_instant_event", "overhead", "Trace")
_PROCESSES = 1000
"""Of a rank: Perfetto shows processes by number, and these are a rank's own."""


def write_merged(ranks: Sequence[RankTrace], target: Path) -> int:
    """Writes `target` (.json.gz or .json), whole or not at all; what comes back is the number of its events.

    Each rank is a process of its own; Python frames and single allocations are left out.

    Raises:
        DdpHpcError: it cannot be written, or a trace is gone.
    """
    zero_ns = [trace.zero_ns + round(trace.clock_s * 1e9) for trace in ranks]
    num_events = 0
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with partial_file(target, "trace") as partial:
            packed = target.suffix == ".gz"
            with cast(BinaryIO, gzip.open(partial, "wb", 4) if packed else partial.open("wb")) as out:
                out.write(b'{"schemaVersion":1,"displayTimeUnit":"ms","traceEvents":[\n')
                for trace, own_ns in zip(ranks, zero_ns, strict=True):
                    for events in _moved(trace, (own_ns - min(zero_ns)) * 1e-3):
                        out.write(b",\n" if num_events else b"")
                        out.write(msgspec.json.encode(events)[1:-1])
                        num_events += len(events)
                out.write(b"\n]}\n")
            partial.replace(target)
    except OSError as error:
        raise DdpHpcError(
            f"{error.filename or target}: cannot be read or written ({error.strerror})"
        ) from error
    return num_events


def _moved(trace: RankTrace, by_us: float) -> Iterator[list[dict[str, Any]]]:
    processes: dict[Any, int] = {}
    for events in read_raw_events(Path(trace.path), Reading()):
        kept = [event for event in events if event.get("cat") not in _LEFT_OUT]
        for event in kept:
            process = processes.setdefault(event.get("pid"), len(processes))
            event["pid"] = trace.rank * _PROCESSES + process
            if isinstance(event.get("ts"), int | float):
                event["ts"] = round(event["ts"] + by_us, 3)
            if "id" in event:  # arrows are numbered from 1 on each rank
                event["id"] = f"{trace.rank}.{event['id']}"
            if event.get("name") == "process_name":
                event["args"] = {"name": f"rank {trace.rank} {trace.host}".strip()}
            if event.get("name") == "process_sort_index":
                event["args"] = {"sort_index": event["pid"]}
        if kept:
            yield kept
