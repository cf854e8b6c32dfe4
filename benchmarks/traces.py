"""Compares `ddp-hpc report` with only parsing the same files, and with HolisticTraceAnalysis.

python benchmarks/traces.py [--gib 1] [--ranks 8] [--hta PYTHON] [--json FILE]

A recording of the default training is repeated with shifted times, until --ranks files have a total size of
--gib. Each method is a separate process with one reader per core. `parse` decodes every file with msgspec,
which the report uses too, to Python objects and drops them. `HolisticTraceAnalysis` loads the directory
with its TraceAnalysis; PYTHON is an interpreter that has it installed
(python -m venv hta && hta/bin/pip install HolisticTraceAnalysis). Memory is the sampled maximum of the PSS
of all processes of a method.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from ddp_hpc.base.text_table import Column, table
from ddp_hpc.bench import results_output as report

COLUMNS = [
    Column("name", "way"),
    Column("wall_s", "s", "{:.2f}".format),
    Column("peak_bytes", "peak MiB", lambda num: f"{num / 2**20:.0f}"),
    Column("vs_parse", "/ parse", "{:.2f}".format),
]
_HTA = "import sys; from hta.trace_analysis import TraceAnalysis; TraceAnalysis(trace_dir=sys.argv[1])"


def parse_one(path: str) -> None:
    import msgspec

    msgspec.json.decode(Path(path).read_bytes())


def parse(directory: Path) -> None:
    files = sorted(map(str, directory.iterdir()))
    with ProcessPoolExecutor(min(len(files), len(os.sched_getaffinity(0))), get_context("fork")) as pool:
        list(pool.map(parse_one, files))


def make_traces(directory: Path, ranks: int, num_bytes: int) -> None:
    """Writes files of about equal size with the events of a real training."""
    with tempfile.TemporaryDirectory() as home:
        words = "--max-steps 5 --num-samples 128 --batch-size 8 --trace-dir traces --trace-window 1,1,2,1"
        argv = [sys.executable, "-m", "ddp_hpc.train", *words.split()]
        subprocess.run(argv, cwd=home, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        import gzip

        document = json.loads(
            gzip.decompress((Path(home) / "traces/rank00000-of-00001.json.gz").read_bytes())
        )
    events = [event for event in document.pop("traceEvents") if event["ph"] != "M"]
    first_us = min(event["ts"] for event in events)
    length_us = max(event["ts"] + event.get("dur", 0) for event in events) - first_us
    for rank in range(ranks):
        document["distributedInfo"] = {"backend": "gloo", "rank": rank, "world_size": ranks}
        with (directory / f"rank{rank:05d}-of-{ranks:05d}.json").open("w") as file:
            file.write(json.dumps(document, indent=2)[:-2] + ',\n  "traceEvents": [\n')
            for again in range(10**6):
                moved = []
                for event in events:
                    name = event["name"]
                    if name.startswith("ProfilerStep#"):
                        name = f"ProfilerStep#{int(name[13:]) + 1000 * again}"
                    moved.append({**event, "name": name, "ts": round(event["ts"] + again * length_us, 3)})
                # Kineto writes each field on a separate line, like `indent`.
                text = json.dumps(moved, indent=2)[2:-2]
                file.write((",\n" if again else "") + text)
                if file.tell() >= num_bytes / ranks:
                    break
            file.write("\n  ]\n}\n")


def measured(argv: list[str]) -> tuple[float, int]:
    """Returns the duration, and the peak memory of the process and its children."""
    start_s = time.perf_counter()
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, start_new_session=True)
    peak = 0
    while process.poll() is None:
        peak = max(peak, _held_bytes(process.pid))
        time.sleep(0.05)
    if process.returncode:
        raise SystemExit(f"{' '.join(argv[:4])}: exit code {process.returncode}")
    return time.perf_counter() - start_s, peak


def _held_bytes(session: int) -> int:
    total = 0
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and os.getsid(int(entry.name)) == session:
                text = (entry / "smaps_rollup").read_text()
                total += sum(
                    int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Pss:")
                )
        except (OSError, ProcessLookupError):
            continue
    return total


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument(
        "--hta", type=Path, metavar="PYTHON", help="an interpreter with HolisticTraceAnalysis"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--parse", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.parse:
        parse(args.parse)
        return
    with tempfile.TemporaryDirectory() as home:
        directory = Path(home)
        make_traces(directory, args.ranks, int(args.gib * 2**30))
        size = sum(file.stat().st_size for file in directory.iterdir())
        ways = {
            "parse (msgspec)": [sys.executable, __file__, "--parse", str(directory)],
            "ddp-hpc report": [sys.executable, "-m", "ddp_hpc", "report", str(directory)],
        }
        if args.hta:
            ways["HolisticTraceAnalysis"] = [str(args.hta), "-c", _HTA, str(directory)]
        for file in directory.iterdir():
            file.read_bytes()  # read into the page cache first
        rows: list[dict[str, Any]] = []
        for name, argv in ways.items():
            wall_s, peak_bytes = measured(argv)
            rows.append({"name": name, "wall_s": wall_s, "peak_bytes": peak_bytes, "trace_bytes": size})
        for row in rows:
            row["vs_parse"] = row["wall_s"] / rows[0]["wall_s"]
    print(f"{size / 2**30:.2f} GiB in {args.ranks} traces, {len(os.sched_getaffinity(0))} cores")
    print(table(COLUMNS, rows))
    result = report.document("traces", rows, ["msgspec"], machine=report.machine())
    report.write_files(result, args.json, None, [], "")


if __name__ == "__main__":
    main()
