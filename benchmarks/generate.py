"""Measures how fast data_gen writes a file, compared with only writing and only generating.

python benchmarks/generate.py [--gib 4] [--directory data] [--distribution uniform] [--runs 3] [--json FILE]

Each row is a separate process, or two under mpiexec, and the rows run in turns. generate: values are
generated in memory only. write: one buffer of values is written repeatedly with the code of data_gen
(layout, size of a write, fsync, rename). data_gen: values are generated and written. The time is that of
the fastest run without the start of Python; peak is the largest resident memory of any rank.
"""

from __future__ import annotations

import argparse
import filecmp
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_gen import Recipe, synthetic
from data_gen.mpi_ranks import connected_ranks
from ddp_hpc.base.text_table import Column, table
from ddp_hpc.base.units import format_bytes
from ddp_hpc.bench import results_output as report

ROWS = [("generate", 1), ("write", 1), ("data_gen", 1), ("write", 2), ("data_gen", 2)]
FILLED: set[int] = set()
COLUMNS = [
    Column("name", "what"),
    Column("ranks", "writers"),
    Column("seconds", "s", "{:.2f}".format),
    Column("bytes_per_s", "GB/s", lambda rate: f"{rate / 1e9:.2f}"),
    Column("vs_write", "of write", "{:.2f}".format),
    Column("vs_generate", "of generate", "{:.2f}".format),
    Column("peak_bytes", "peak", format_bytes),
]


def recipe_of(args: argparse.Namespace) -> Recipe:
    """Returns a recipe of the requested size with default shapes; for tokens, src and tgt are 20 x 512."""
    kind = {"distribution": args.distribution}
    if args.distribution == "tokens":
        kind |= {"src_shape": (20, 512), "dtype": "int32"}
    recipe = Recipe(**kind)
    return replace(recipe, num_samples=max(1, int(args.gib * 2**30) // recipe.bytes_per_sample))


def draw_once(stream: np.random.Generator, out: NDArray[Any], _: str) -> None:
    """Fills a buffer when it is used for the first time."""
    buffer = out if out.base is None else out.base
    if buffer.ctypes.data not in FILLED:
        FILLED.add(buffer.ctypes.data)
        stream.random(dtype=buffer.dtype, out=buffer)


def file_of(args: argparse.Namespace, what: str, ranks: int) -> Path:
    return args.directory / f"{what}-{ranks}.h5"


def run_row(what: str, args: argparse.Namespace) -> None:
    """Measures one row in this process; rank 0 prints the time and memory as JSON."""
    recipe = recipe_of(args)
    with connected_ranks(600.0) as comm:
        start = time.perf_counter()
        if what == "generate":
            for _ in synthetic.part(recipe):
                pass
        else:
            if what == "write":
                recipe = replace(recipe, distribution="uniform", dtype="float32")
                synthetic._draw_uniform = draw_once
            synthetic.generate(recipe, file_of(args, what, comm.size), comm=comm)
        seconds = time.perf_counter() - start
        lines = Path("/proc/self/status").read_text().splitlines()
        peak = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
        peaks = comm.allgather(peak)
    if comm.rank == 0:
        print(json.dumps({"seconds": seconds, "peak_bytes": max(peaks)}))


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    num_bytes = recipe_of(args).num_bytes
    best: dict[tuple[str, int], dict[str, Any]] = {}
    for _ in range(args.runs):
        for what, ranks in ROWS:
            os.sync()  # finish the writes of the previous row
            # Remove the file right before the start of the row, because the host of a virtual machine
            # reclaims free memory after two seconds, and allocating it again takes longer than the
            # measured work.
            file_of(args, what, ranks).unlink(missing_ok=True)
            argv = [sys.executable, __file__, "--row", what, "--gib", str(args.gib)]
            argv += ["--directory", str(args.directory), "--distribution", args.distribution]
            if ranks > 1:
                argv = [str(Path(sys.executable).parent / "mpiexec"), "-n", str(ranks), *argv]
            done = subprocess.run(argv, stdout=subprocess.PIPE, text=True)
            if done.returncode != 0:
                sys.exit(f"error: {what} with {ranks} writers ended with exit code {done.returncode}")
            row = json.loads(done.stdout)
            if (what, ranks) not in best or row["seconds"] < best[what, ranks]["seconds"]:
                best[what, ranks] = row
    rates = {key: num_bytes / row["seconds"] for key, row in best.items()}
    return [
        {
            "name": what,
            "ranks": ranks,
            "bytes": num_bytes,
            **best[what, ranks],
            "bytes_per_s": rates[what, ranks],
            "vs_write": rates[what, ranks] / rates["write", 1],
            "vs_generate": rates[what, ranks] / rates["generate", 1],
        }
        for what, ranks in ROWS
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gib", type=float, default=4.0, help="size of the file in GiB")
    parser.add_argument("--directory", type=Path, default=Path("data"), help="directory for temporary files")
    parser.add_argument("--distribution", default="uniform")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--row", choices=sorted({what for what, _ in ROWS}), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.row:
        run_row(args.row, args)
        return
    report.check_files(args.json, None)
    args.directory.mkdir(parents=True, exist_ok=True)
    needed_bytes = (len(ROWS) - 1) * recipe_of(args).num_bytes
    free_bytes = shutil.disk_usage(args.directory).free
    if free_bytes < needed_bytes:
        sys.exit(
            f"error: {args.directory} has {format_bytes(free_bytes)} free, but {format_bytes(needed_bytes)} "
            "are needed; choose another --directory, or reduce --gib"
        )
    try:
        rows = measure(args)
        same = filecmp.cmp(*(file_of(args, "data_gen", ranks) for ranks in (1, 2)), shallow=False)
    finally:
        for row in ROWS:
            file_of(args, *row).unlink(missing_ok=True)
    print(table(COLUMNS, rows))
    print(f"the files of one writer and of two writers are {'identical' if same else 'NOT identical'}")
    result = report.document("generate", rows, machine=report.machine(), same_bytes=same)
    report.write_files(result, args.json, None, [], "")
    sys.exit(not same)


if __name__ == "__main__":
    main()
