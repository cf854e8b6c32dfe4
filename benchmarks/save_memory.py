"""Measures how much host memory a sharded save takes on each rank, relative to the rank's own shards.

python benchmarks/save_memory.py [--ranks 4] [--strategies fsdp pp] [--layers 64] [--width 2048]
                                 [--dtype float32] [--directory DIR] [--json FILE]

The model is a sequence of square matrices. Its state is the parameters and the two states of Adam: 12 bytes
per parameter in float32, and 6 in bfloat16. Gradients are freed before the save. `peak / own` is the largest
amount of memory that the process has used during a save, minus that before the first save, divided by the
rank's own part of the state; the rank with the largest value is shown. `pause` is the time that the slowest
rank waits for a save, and `written` the time until the snapshot is complete. The ranks run on this machine
under mpiexec. The memory must hold the state twice. While the model is created, it must also hold a copy of
the whole model for each rank, because this program does not create the model in parts.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ddp_hpc
from ddp_hpc.base.text_table import Column, table
from ddp_hpc.bench import results_output
from ddp_hpc.data.step_shards import Position
from ddp_hpc.training.config import TrainConfig
from ddp_hpc.training.parallel.make_strategy import make_strategy
from ddp_hpc.training.run.lifecycle import manage_run
from ddp_hpc.training.run.resumable import Losses
from ddp_hpc.training.tasks.task import Task

GIB = 2**30
COLUMNS = [
    Column("strategy", "strategy"),
    Column("save", "save"),
    Column("parameters", "parameters", "{:,}".format),
    Column("whole_bytes", "whole state GiB", lambda value: f"{value / GIB:.2f}"),
    Column("own_bytes", "own GiB", lambda value: f"{value / GIB:.2f}"),
    Column("peak_bytes", "peak GiB", lambda value: f"{value / GIB:.2f}"),
    Column("ratio", "peak / own", "{:.3f}".format),
    Column("pause_s", "pause s", "{:.2f}".format),
    Column("written_s", "written s", "{:.2f}".format),
]
_M_MMAP_THRESHOLD = -3  # A parameter of mallopt(3), from malloc.h.


def resident_bytes(name: str) -> int:
    """Reads `VmRSS`, or `VmHWM` for its peak since the last reset."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")  # proc_pid_clear_refs(5)


def trained(model: nn.Module, config: TrainConfig, group: Any) -> Any:
    """The strategy after an optimizer step, which creates the states of Adam."""
    shared = make_strategy(Task(model=model), group, config.parallel, config.optimization)
    for parameter in shared.parameters():
        parameter.grad = torch.zeros_like(parameter)
    shared.optimizer.step()
    shared.optimizer.zero_grad(set_to_none=True)
    return shared


def measure(world: Any, strategy: str, layers: int, width: int, folder: Path) -> list[dict[str, Any]]:
    """Saves twice; returns a row for each save. Collective."""
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    config = TrainConfig.of(strategy=strategy, snapshot_dir=folder, keep=1)
    shared = trained(model, config, world.group)
    del model
    rows = []
    with manage_run(config, world.group, world.progress, world.parts) as lifecycle:
        lifecycle.resume(lifecycle.open(), shared.state(), None, shared.mesh)
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        own_bytes = shared.state_bytes()
        before = resident_bytes("VmRSS")
        for number, what in enumerate(("first", "second"), start=1):
            reset_peak()
            start_s = time.perf_counter()
            lifecycle.save(Position(number), Losses(), shared.state(), lambda: None)
            pause_s = time.perf_counter() - start_s
            lifecycle.finish(Position(number), "", lambda: None)
            taken = [own_bytes, resident_bytes("VmHWM") - before, pause_s, time.perf_counter() - start_s]
            of_ranks = world.gather(torch.tensor(taken, dtype=torch.float64)).tolist()
            own, peak, _, _ = max(of_ranks, key=lambda one: one[1] / one[0])
            rows.append(
                {
                    "strategy": strategy,
                    "save": what,
                    "ranks": len(of_ranks),
                    "parameters": layers * width * width,
                    "whole_bytes": int(sum(one[0] for one in of_ranks)),
                    "own_bytes": int(own),
                    "peak_bytes": int(peak),
                    "ratio": peak / own,
                    "ratios": [one[1] / one[0] for one in of_ranks],
                    "pause_s": max(one[2] for one in of_ranks),
                    "written_s": max(one[3] for one in of_ranks),
                }
            )
    shutil.rmtree(folder, ignore_errors=True)
    return rows


def as_rank(args: argparse.Namespace) -> None:
    torch.set_default_dtype(getattr(torch, args.dtype))
    with ddp_hpc.distributed(threads=1) as world:
        # Freed memory is returned immediately, so that the next save cannot reuse it.
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 2**16)
        rows = []
        for name in args.strategies:
            rows += measure(world, name, args.layers, args.width, args.directory.resolve() / name)
        if world.is_first:
            args.json.write_text(json.dumps(rows))


def run_ranks(num: int, *words: str) -> None:
    """Runs `python WORDS` on this number of ranks; exits with an error if they fail."""
    mpiexec = shutil.which("mpiexec", path=str(Path(sys.executable).parent))
    done = subprocess.run([str(mpiexec), "-n", str(num), sys.executable, *words])
    if done.returncode != 0:
        sys.exit(f"error: the ranks under mpiexec exited with code {done.returncode}")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--strategies", nargs="+", default=["fsdp", "pp"])
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument(
        "--directory", type=Path, help="directory for the files; default: a temporary directory"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.rank:
        as_rank(args)
        raise SystemExit(0)
    with tempfile.TemporaryDirectory(prefix="ddp-hpc-bench-", dir=args.directory) as made:
        results = Path(made, "rows.json")
        words = ["--rank", "--directory", made, "--json", str(results), "--dtype", args.dtype]
        words += ["--layers", str(args.layers), "--width", str(args.width), "--strategies", *args.strategies]
        run_ranks(args.ranks, __file__, *words)
        rows = json.loads(results.read_text())
    result = results_output.document("save_memory", rows)
    print(table(COLUMNS, rows))
    results_output.save(result, args.json)


if __name__ == "__main__":
    main()
