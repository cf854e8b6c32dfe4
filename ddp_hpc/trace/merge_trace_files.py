"""Merges the traces of all ranks into one file with a common clock, for Perfetto."""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

import msgspec

from ddp_hpc.base.atomic_files import partial_file, remove_leftovers
from ddp_hpc.base.errors import DdpHpcError
from ddp_hpc.trace.analysis_results import RankTrace
from ddp_hpc.trace.parse_events import Reading, read_raw_events

_LEFT_OUT = ("python_function", "cpu_instant_event", "overhead", "Trace")
_PROCESSES = 1000
"""Offset between the process IDs of two ranks, since Perfetto identifies processes by number."""


def write_merged(ranks: Sequence[RankTrace], target: Path) -> int:
    """Writes `target` (.json.gz or .json) atomically, and returns the number of its events.

    Each rank is shown as a separate process. Python frames and single allocations are omitted.

    Raises:
        DdpHpcError: the file cannot be written, or a trace no longer exists.
    """
    zero_ns = [trace.zero_ns + round(trace.clock_s * 1e9) for trace in ranks]
    num_events = 0
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(target.parent, "trace")
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
        raise DdpHpcError(f"cannot read or write {error.filename or target} ({error.strerror})") from error
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
            if "id" in event:  # flow arrows are numbered from 1 on each rank
                event["id"] = f"{trace.rank}.{event['id']}"
            if event.get("name") == "process_name":
                event["args"] = {"name": f"rank {trace.rank} {trace.host}".strip()}
            if event.get("name") == "process_sort_index":
                event["args"] = {"sort_index": event["pid"]}
        if kept:
            yield kept
