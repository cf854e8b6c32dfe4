"""Merges the traces of all ranks into one file, which Perfetto (https://ui.perfetto.dev) opens.

Both formats are the "Trace Event Format" of Chromium's catapult project. In the merged file, timestamps are
on the common clock of the report, and the IDs of processes, threads and flows are unique across ranks.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from ddp_hpc.base.atomic_files import partial_file
from ddp_hpc.base.errors import DdpHpcError
from ddp_hpc.trace.analysis_results import RankTrace
from ddp_hpc.trace.event_columns import Numbers
from ddp_hpc.trace.parse_events import Reading, read_events
from ddp_hpc.trace.report_files import MERGED_NAME

_MOST_PROCESSES, _MOST_THREADS = 10_000, 100_000
"""The distances between the IDs of two ranks. Perfetto's IDs have 32 bits."""
_LARGE_ID = 1 << 40
"""IDs of flows below this number are kept. Perfetto reads no file with an integer above 2**63."""
_Event: TypeAlias = dict[str, Any]


def write_merged(path: Path, ranks: Sequence[RankTrace]) -> None:
    """Writes the merged trace, compressed with gzip.

    Raises:
        DdpHpcError: the file cannot be written, or a trace can no longer be read.
    """
    zero_ns = min(trace.clock_ns for trace in ranks)
    encode = msgspec.json.Encoder().encode
    begin = b'{"traceEvents":[\n'
    try:
        with partial_file(path, "report") as partial:
            with partial.open("xb") as raw, gzip.GzipFile(MERGED_NAME, "wb", 1, raw, mtime=0) as file:
                for number, trace in enumerate(ranks):
                    # Whole microseconds, since fractions would be inexact in times since 1970.
                    for events in _moved(trace, number, len(ranks), (trace.clock_ns - zero_ns) // 1000):
                        file.write(begin + b",\n".join(map(encode, events)))
                        begin = b",\n"
                file.write(b"\n]}\n")
            partial.rename(path)
    except OSError as error:
        raise DdpHpcError(f"the merged trace {path} cannot be written ({error})") from error


def _moved(trace: RankTrace, number: int, num_ranks: int, by_us: int) -> Iterator[list[_Event]]:
    """Yields the events of a rank, whose number and name are in the IDs and names of its processes."""
    pids: Numbers[str] = Numbers()
    tids: Numbers[tuple[int, str]] = Numbers()
    ids: Numbers[str] = Numbers()
    for events in read_events(Path(trace.path), Reading(), _Event):
        for event in events:
            tid = str(event.get("tid", 0))
            event["pid"] = number * _MOST_PROCESSES + pids[str(event.get("pid", 0))] + 1
            # Perfetto may look up the name of a thread by its ID alone.
            event["tid"] = number * _MOST_THREADS + tids[event["pid"], tid] + 1
            if isinstance(event.get("ts"), int | float):
                event["ts"] += by_us
            if (own := event.get("id")) is not None:
                is_small = isinstance(own, int) and 0 <= own < _LARGE_ID
                event["id"] = (own if is_small else _LARGE_ID + ids[str(own)]) * num_ranks + number
            if event.get("s") == "g":  # an instant of all processes, which would be one of all ranks
                event["s"] = "p"
            if event.get("ph") == "M" and isinstance(args := event.get("args"), dict):
                if event.get("name") == "process_name":
                    args["name"] = f"rank {trace.rank}: {args.get('name')}"
                elif event.get("name") == "process_labels":
                    # Perfetto does not show Kineto's labels, such as `GPU 0`, so they become the name.
                    name = f"rank {trace.rank}: {args.get('labels')}"
                    event |= {"name": "process_name", "args": {"name": name}}
                elif event.get("name") == "process_sort_index":
                    args["sort_index"] = event["pid"]
        yield events
