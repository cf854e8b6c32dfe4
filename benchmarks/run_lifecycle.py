"""Measures the overhead of the run lifecycle: the pause of a save, and deadline and heartbeat per step.

python benchmarks/run_lifecycle.py [--rounds 6] [--directory data] [--json FILE]

save: the default model and Adam on one rank. A round is a step, torch.save of model and optimizer to one
file (blocking, as in tutorials), a step, our save (the state is copied, and a thread writes it), and a
step during that write. A pause is the time that the loop waits. step: the calls for deadline and heartbeat
in each step on two ranks, each timed over many calls, compared with the step.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from ddp_hpc.base.text_table import Column, table
from ddp_hpc.bench import results_output
from ddp_hpc.data.step_shards import Position
from ddp_hpc.training.config import TrainConfig
from ddp_hpc.training.health.rank_report import RankReports
from ddp_hpc.training.run.lifecycle import manage_run
from ddp_hpc.training.run.parts import Parts
from ddp_hpc.training.session import session, watching_of
from ddp_hpc.training.snapshots.host_buffer import Stream, specs_of
from ddp_hpc.training.snapshots.snapshot_directory import SnapshotDirectory
from ddp_hpc.training.snapshots.training_state import live_tensors, optimizer_tensors
from ddp_hpc.training.tasks.builtin_models import TASKS
from ddp_hpc.training.tasks.task import SampleSpec, make_task
from ddp_hpc.training.telemetry.progress_bar import Progress

SPEC = SampleSpec((1, 512), (20, 512), None)
COLUMNS = [
    Column("name", "what"),
    Column("median_s", "s", "{:.6f}".format),
    Column("max_s", "max s", "{:.6f}".format),
    Column("vs_torch_save", "/ torch_save", "{:.3f}".format),
    Column("vs_step", "/ step", "{:.5f}".format),
]


class Training:
    """Runs steps of the default model on random numbers."""

    def __init__(self, batch_size: int) -> None:
        self.model = make_task("transformer", TASKS["transformer"], SPEC, 0.1, {}, 0).model
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        self.src, self.tgt = torch.rand(batch_size, 1, 512), torch.rand(batch_size, 20, 512)

    def step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        functional.cross_entropy(self.model(self.src, self.tgt), self.tgt).backward()
        self.optimizer.step()


def timed(call: Callable[[], Any]) -> float:
    start_s = time.perf_counter()
    call()
    return time.perf_counter() - start_s


def measure_saves(directory: Path, rounds: int) -> dict[str, list[float]]:
    training = Training(batch_size=32)
    taken: dict[str, list[float]] = {
        name: [] for name in ("step", "torch_save", "save", "step_while_writing", "written")
    }
    ours = SnapshotDirectory(
        directory / "snapshots", 1, lambda line: print(line, file=sys.stderr), lambda _: None
    )

    def blocking() -> None:
        state = {"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()}
        torch.save(state, directory / "blocking.pt")

    def save(number: int) -> None:
        model, optimizer = training.model, training.optimizer
        states = optimizer_tensors(live_tensors(model), [optimizer])
        streams = [Stream(specs_of(values), values.items()) for values in (model.state_dict(), states)]
        ours.save(number, {}, *streams)

    for number in range(rounds + 1):  # the first round allocates and is not counted
        row = {"step": timed(training.step), "torch_save": timed(blocking)}
        training.step()
        row |= {"save": timed(lambda n=number: save(n)), "step_while_writing": timed(training.step)}
        row["written"] = ours.wait().seconds
        if number:
            for name, seconds in row.items():
                taken[name].append(seconds)
    ours.close()
    return taken


def measure_step(directory: Path) -> dict[str, list[float]]:
    """Measures the calls for deadline and heartbeat, and a step. Collective, under mpiexec."""
    config = TrainConfig.of(snapshot_dir=directory / "step", backend="gloo")
    taken: dict[str, list[float]] = {}
    with ExitStack() as stack:
        parts = Parts()
        group, heartbeat = stack.enter_context(session(config.process_group, parts, watching_of(config)))
        lifecycle = stack.enter_context(manage_run(config, group, Progress(prints=False), parts))
        lifecycle.open()
        training = Training(batch_size=32)
        model = torch.nn.parallel.DistributedDataParallel(training.model)
        training.model = model
        training.step()
        taken["step"] = [timed(training.step) for _ in range(8)]

        def calls() -> None:
            for phase in ("data", "forward", "backward", "optimizer", "exchange"):
                heartbeat.at(1, phase)
            own = lifecycle.report(1.0, 1.0)
            lifecycle.decide(RankReports(torch.tensor([own, own])), Position(1, 0, 64, 64), last=False)

        taken["deadline_and_heartbeat"] = [timed(calls) for _ in range(2000)]
        reports = torch.zeros(4, dtype=torch.float64)
        taken["exchange_of_reports"] = [timed(lambda: group.gather(reports).tolist()) for _ in range(2000)]
        heartbeat.close()
    return taken


def rows_of(taken: dict[str, list[float]], group: str) -> list[dict[str, Any]]:
    medians = {name: statistics.median(seconds) for name, seconds in taken.items()}
    return [
        {
            "name": f"{group}: {name}",
            "median_s": medians[name],
            "max_s": max(seconds),
            "vs_torch_save": medians[name] / medians["torch_save"] if "torch_save" in medians else None,
            "vs_step": medians[name] / medians["step"],
        }
        for name, seconds in taken.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument(
        "--directory", type=Path, help="directory for the files; default: a temporary directory"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--part", choices=("step",), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        print(json.dumps(rows_of(measure_step(args.directory), "step on 2 ranks")), flush=True)
        return
    with tempfile.TemporaryDirectory(prefix="ddp-hpc-bench-", dir=args.directory) as made:
        directory = Path(made)
        rows = rows_of(measure_saves(directory, args.rounds), "save")
        mpiexec = shutil.which("mpiexec", path=str(Path(sys.executable).parent))
        argv = [str(mpiexec), "-n", "2", sys.executable, __file__, "--part", "step"]
        argv += ["--directory", str(directory)]
        done = subprocess.run(argv, stdout=subprocess.PIPE, text=True)
        if done.returncode != 0:
            sys.exit(f"error: the part under mpiexec exited with code {done.returncode}")
        rows += json.loads(done.stdout.splitlines()[0])
    result = results_output.document("run_lifecycle", rows)
    print(table(COLUMNS, rows))
    results_output.save(result, args.json)


if __name__ == "__main__":
    main()
