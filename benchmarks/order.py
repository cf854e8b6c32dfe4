"""Measures the cost of the order of an epoch, compared with torch's DistributedSampler.

python benchmarks/order.py [--ranks 8] [--json FILE]

open: from the start to the first batch of 32. peak: the increase of the process's resident memory.
batch: mean time of 2000 batches of one rank. resume: from the start to the first batch of the second half of
an epoch. Each run is a separate process. Our values are medians of 5 runs; the sampler runs once, because it
needs 5 GB of memory and half a minute for 10^8 samples.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

from ddp_hpc.base.text_table import Column, table
from ddp_hpc.bench import results_output as report
from ddp_hpc.data.sample_order import EpochOrder

BATCH, NUM_BATCHES = 32, 2000
RUNS = {"epoch_order": 5, "distributed_sampler": 1}
MEASURED = ("open_us", "peak_bytes", "batch_us", "resume_us")
ROWS = [
    ("epoch_order", 10**7),
    ("epoch_order", 10**8),
    ("epoch_order", 10**10),
    ("distributed_sampler", 10**7),
    ("distributed_sampler", 10**8),
]


def epoch_order(num_samples: int, ranks: int) -> Callable[[int], Iterator[list[int]]]:
    """Returns a function that yields rank 0's batches of 32 from a step on."""

    def batches(step: int) -> Iterator[list[int]]:
        order = EpochOrder(num_samples, seed=0, epoch=1)
        for start in range(step * ranks * BATCH, num_samples - BATCH, ranks * BATCH):
            yield order.take(start, start + BATCH).tolist()

    return batches


def distributed_sampler(num_samples: int, ranks: int) -> Callable[[int], Iterator[list[int]]]:
    from torch.utils.data import DistributedSampler

    def batches(step: int) -> Iterator[list[int]]:
        sampler = DistributedSampler(range(num_samples), num_replicas=ranks, rank=0, shuffle=True)
        sampler.set_epoch(1)
        numbers = islice(sampler, step * BATCH, None)
        while batch := list(islice(numbers, BATCH)):
            yield batch

    return batches


def resident_bytes(field: str) -> int:
    """Reads VmRSS, or VmHWM for its peak. getrusage would include the peak of the parent process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def measure(name: str, num_samples: int, ranks: int) -> dict[str, object]:
    batches = {"epoch_order": epoch_order, "distributed_sampler": distributed_sampler}[name](
        num_samples, ranks
    )
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak, which the imports have reached
    before_bytes = resident_bytes("VmRSS")
    start_s = time.perf_counter()
    first_half = batches(0)
    first = next(first_half)
    open_s = time.perf_counter() - start_s
    peak_bytes = resident_bytes("VmHWM") - before_bytes
    start_s = time.perf_counter()
    num_batches = sum(1 for _ in islice(first_half, NUM_BATCHES))
    batch_s = (time.perf_counter() - start_s) / num_batches
    del first_half  # also frees the sampler's list
    start_s = time.perf_counter()
    middle = next(batches(num_samples // (2 * ranks * BATCH)))
    resume_s = time.perf_counter() - start_s
    if len({*first, *middle}) != 2 * BATCH:
        raise AssertionError(f"{name}: a sample was repeated within an epoch")
    return {
        "name": name,
        "samples": num_samples,
        "open_us": open_s * 1e6,
        "peak_bytes": peak_bytes,
        "batch_us": batch_s * 1e6,
        "resume_us": resume_s * 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--row", type=int, help=argparse.SUPPRESS)  # in a separate process
    options = parser.parse_args()
    if options.row is not None:
        print(json.dumps(measure(*ROWS[options.row], options.ranks)))
        return
    report.check_files(options.json, None)
    rows = []
    for row, (name, num_samples) in enumerate(ROWS):
        print(f"{name}, {num_samples:.0e} samples", file=sys.stderr)
        argv = [sys.executable, __file__, "--ranks", str(options.ranks), "--row", str(row)]
        runs = [
            json.loads(subprocess.run(argv, check=True, stdout=subprocess.PIPE).stdout)
            for _ in range(RUNS[name])
        ]
        rows.append(runs[0] | {field: statistics.median(run[field] for run in runs) for field in MEASURED})
    columns = [
        Column("name", "order"),
        Column("samples", "samples", "{:.0e}".format),
        Column("open_us", "open ms", lambda us: f"{us / 1e3:.2f}"),
        Column("peak_bytes", "peak MB", lambda size: f"{size / 1e6:.1f}"),
        Column("batch_us", "batch us", "{:.1f}".format),
        Column("resume_us", "resume ms", lambda us: f"{us / 1e3:.2f}"),
    ]
    print(table(columns, rows))
    result = report.document("order", rows, machine=report.machine(), ranks=options.ranks)
    report.write_files(result, options.json, None, [], "")


if __name__ == "__main__":
    main()
