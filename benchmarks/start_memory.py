"""Measures how much host memory each rank takes to create its part of a model.

python -m benchmarks.start_memory [--ranks 4] [--strategies fsdp tp pp] [--layers 240] [--width 2048]
                                  [--dtype bfloat16] [--json FILE]

The model is a sequence of square matrices. Each strategy is started twice: as `python -m ddp_hpc.train` does,
where no rank holds the whole model, and with the whole model in the memory of every rank, as with models that
cannot be created otherwise. `peak` is the largest amount of memory that a rank has used, minus the amount
before the model was created; `own` is the size of its parameters; the rank with the largest ratio is shown.
The ranks run on this machine under mpiexec, and whole models must fit into its memory once for each rank.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ddp_hpc
from benchmarks.save_memory import GIB, reset_peak, resident_bytes, run_ranks
from ddp_hpc.base.text_table import Column, table
from ddp_hpc.bench import results_output
from ddp_hpc.training.config import TrainConfig
from ddp_hpc.training.parallel.make_strategy import make_strategy
from ddp_hpc.training.tasks.initial_values import without_memory
from ddp_hpc.training.tasks.recorded_init import Recorder
from ddp_hpc.training.tasks.task import Task

WAYS = {"parts": "own part only", "whole": "whole model first"}
COLUMNS = [
    Column("strategy", "strategy"),
    Column("way", "in memory"),
    Column("parameters", "parameters", "{:,}".format),
    Column("whole_bytes", "whole model GiB", lambda value: f"{value / GIB:.2f}"),
    Column("own_bytes", "own GiB", lambda value: f"{value / GIB:.2f}"),
    Column("peak_bytes", "peak GiB", lambda value: f"{value / GIB:.2f}"),
    Column("ratio", "peak / own", "{:.3f}".format),
    Column("start_s", "start s", "{:.1f}".format),
]


def split_by_columns_and_rows(model: nn.Module) -> dict[str, Any]:
    """Splits each pair of matrices by columns and then by rows."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return {name: (ColwiseParallel, RowwiseParallel)[i % 2]() for i, name in enumerate(names)}


def created(layers: int, width: int) -> Task:
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    return Task(model=model, tensor_parallel=split_by_columns_and_rows)


def measure(world: Any, strategy: str, way: str, layers: int, width: int) -> dict[str, Any]:
    """Creates the model on all ranks, and measures the memory that this takes. Collective."""
    config = TrainConfig.of(strategy=strategy)
    before = resident_bytes("VmRSS")
    reset_peak()
    start_s = time.perf_counter()
    initial = None
    if way == "parts":
        recorder = Recorder()
        with recorder.recording():
            task = created(layers, width)
        initial = without_memory(task.model, recorder, lambda: created(layers, width).model, print)
        del recorder
    else:
        task = created(layers, width)
    shared = make_strategy(task, world.group, config.parallel, config.optimization, initial)
    taken = [shared.state_bytes(), resident_bytes("VmHWM") - before, time.perf_counter() - start_s]
    of_ranks = world.gather(torch.tensor(taken, dtype=torch.float64)).tolist()
    own, peak, _ = max(of_ranks, key=lambda one: one[1] / one[0])
    return {
        "strategy": strategy,
        "way": WAYS[way],
        "ranks": len(of_ranks),
        "parameters": layers * width * width,
        "whole_bytes": layers * width * width * torch.get_default_dtype().itemsize,
        "own_bytes": int(own),
        "peak_bytes": int(peak),
        "ratio": peak / own,
        "ratios": [one[1] / one[0] for one in of_ranks],
        "start_s": max(one[2] for one in of_ranks),
    }


def as_rank(args: argparse.Namespace) -> None:
    torch.set_default_dtype(getattr(torch, args.dtype))
    with ddp_hpc.distributed(threads=1) as world:
        row = measure(world, args.strategies[0], args.way, args.layers, args.width)
        if world.is_first:
            args.json.write_text(json.dumps(row))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4, help="number of ranks")
    parser.add_argument("--strategies", nargs="+", default=["fsdp", "tp", "pp"], help="strategies to measure")
    parser.add_argument("--layers", type=int, default=240, help="number of matrices")
    parser.add_argument("--width", type=int, default=2048, help="rows and columns of each matrix")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="data type")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--way", choices=tuple(WAYS), help=argparse.SUPPRESS)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.rank:
        as_rank(args)
        raise SystemExit(0)
    rows = []
    words = ["--rank", "--dtype", args.dtype, "--layers", str(args.layers), "--width", str(args.width)]
    with tempfile.TemporaryDirectory(prefix="ddp-hpc-bench-") as made:
        for strategy in args.strategies:
            for way in WAYS:
                result = Path(made, f"{strategy}-{way}.json")
                job = [*words, "--strategies", strategy, "--way", way, "--json", str(result)]
                run_ranks(args.ranks, "-m", "benchmarks.start_memory", *job)
                rows.append(json.loads(result.read_text()))
    document = results_output.document("start_memory", rows)
    print(table(COLUMNS, rows))
    results_output.save(document, args.json)


if __name__ == "__main__":
    main()
