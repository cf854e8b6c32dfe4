"""Compares our training loop with a plain one, in turns: same model, same data, same order.

python benchmarks/step.py [--steps 20] [--window 1] [--device auto] [--json FILE]

Each loop is a separate process, started as by a user, and only one of them runs a window of steps at a
time. `lesson` is the loop of a tutorial: a TensorDataset in memory with a DataLoader, torch.nn.Transformer,
Adam and CrossEntropyLoss; it reads the loss of each step. `ours` is `python -m ddp_hpc.train` on the HDF5
file with the same numerics, and logs once per window. Times are wall times from the start of a window until
the loss of its last step is known, divided by the number of steps. With the default window of one step, each
time includes the start of a step; on a GPU, use windows of 50 to 100 steps. `--embedding 64` makes the model
smaller.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_gen import Recipe, generate
from ddp_hpc.base.text_table import Column, table
from ddp_hpc.bench import results_output

BATCH_SIZE, WARM_UP = 32, 3
COLUMNS = [
    Column("name", "loop"),
    Column("median_s", "s", "{:.4f}".format),
    Column("min_s", "min s", "{:.4f}".format),
    Column("max_s", "max s", "{:.4f}".format),
    Column("vs_lesson", "/ lesson", "{:.3f}".format),
    Column("loss_distance", "loss off by", "{:.1e}".format),
]
LOOPS = {
    "lesson": [],
    "ours": ["--no-fused"],
    "ours, fused": ["--fused"],
}


_LOSSES: list[float] = []


def turn(record: dict[str, Any]) -> None:
    """The function of `--metrics-hook`: reports each completed window, and waits until the next may start."""
    _LOSSES.append(record["loss"])
    if len(_LOSSES) % int(os.environ["STEP_WINDOW"]) == 0:
        # Our loop has started the next step already, which must not run during the window of another loop.
        if (torch := sys.modules.get("torch")) is not None and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        os.write(int(os.environ["STEP_OUT"]), (json.dumps(_LOSSES) + "\n").encode())
        _LOSSES.clear()
        os.read(int(os.environ["STEP_IN"]), 1)


def lesson(
    path: Path, device_name: str, on_step: Callable[[dict[str, Any]], None] = turn, epochs: int = 1
) -> None:
    """The plain loop. It reads the loss of each step, as a progress line does."""
    import h5py
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from ddp_hpc.data.sample_order import EpochOrder

    with h5py.File(path) as file:
        dataset = TensorDataset(*(torch.from_numpy(file[name][...]) for name in ("src", "tgt")))
    device = torch.device(device_name)
    torch.manual_seed(0)
    model = torch.nn.Transformer(dataset[0][0].shape[-1], batch_first=True, dropout=0.0).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    loss_of = torch.nn.CrossEntropyLoss()
    for epoch in range(epochs):
        order = EpochOrder(len(dataset), 0, epoch, True).take(0, len(dataset)).tolist()
        for src, tgt in DataLoader(dataset, batch_size=BATCH_SIZE, sampler=order):
            src, tgt = src.to(device), tgt.to(device)
            optimizer.zero_grad()
            loss = loss_of(model(src, tgt), tgt)
            loss.backward()
            optimizer.step()
            on_step({"loss": loss.item()})


@dataclass
class Loop:
    """A process that runs a window of steps on request."""

    name: str
    process: subprocess.Popen[bytes]
    ready: Any
    go: int
    window: int
    log: Path
    times_s: list[float]
    losses: list[float]

    def run_window(self) -> None:
        start_s = time.perf_counter()
        os.write(self.go, b"!")
        self.wait()
        self.times_s.append((time.perf_counter() - start_s) / self.window)

    def wait(self) -> None:
        line = self.ready.readline()
        if not line:
            lines = self.log.read_text(errors="replace").splitlines()[-5:]
            raise SystemExit(f"{self.name}: exited with code {self.process.wait()}: {' | '.join(lines)}")
        self.losses += json.loads(line)


def start(name: str, options: list[str], directory: Path, path: Path, device: str, window: int) -> Loop:
    out_read, out_write = os.pipe()
    in_read, in_write = os.pipe()
    if name == "lesson":
        argv = [sys.executable, __file__, "--lesson", str(path), "--device", device]
    else:
        argv = [sys.executable, "-m", "ddp_hpc.train", "--data", str(path), "--dropout", "0", "--epochs", "1"]
        argv += ["--log-every", str(window), "--metrics-hook", "step:turn", "--device", device, *options]
    here = Path(__file__).resolve().parent
    env = {**os.environ, "STEP_OUT": str(out_write), "STEP_IN": str(in_read), "STEP_WINDOW": str(window)}
    # Add the project's directory too, because `python -m` adds only the current directory to sys.path.
    env["PYTHONPATH"] = os.pathsep.join([str(here), str(here.parent), os.environ.get("PYTHONPATH", "")])
    log_file = directory / f"{name}.log"
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            argv, cwd=directory, env=env, pass_fds=(out_write, in_read), stdout=log, stderr=subprocess.STDOUT
        )
    os.close(out_write)
    os.close(in_read)
    return Loop(name, process, os.fdopen(out_read, "rb"), in_write, window, log_file, [], [])


def measure(num_steps: int, device: str, window: int, embedding: int) -> list[dict[str, Any]]:
    num_windows = -(-num_steps // window)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        path = directory / "data.h5"
        generate(
            Recipe(
                num_samples=(num_windows + WARM_UP + 2) * window * BATCH_SIZE,
                src_shape=(1, embedding),
                tgt_shape=(20, embedding),
            ),
            path,
        )
        loops = []
        try:
            for loop_name, options in LOOPS.items():
                loops.append(start(loop_name, options, directory, path, device, window))
                loops[-1].wait()  # the first window, which allocates and compiles
            for _ in range(WARM_UP + num_windows):
                for loop in loops:
                    loop.run_window()
        finally:
            for loop in loops:
                loop.process.kill()
                loop.process.wait()
    first = loops[0]
    base_s = statistics.median(first.times_s[WARM_UP:])
    rows = []
    for loop in loops:
        times_s = loop.times_s[WARM_UP:]
        pairs = zip(loop.losses, first.losses, strict=True)
        rows.append(
            {
                "name": loop.name,
                "median_s": statistics.median(times_s),
                "min_s": min(times_s),
                "max_s": max(times_s),
                # Each ratio is of adjacent measurements, so that other load on the machine affects both.
                "vs_lesson": statistics.median(
                    own_s / its_s for own_s, its_s in zip(times_s, first.times_s[WARM_UP:], strict=True)
                ),
                "vs_lesson_of_medians": statistics.median(times_s) / base_s,
                "loss_distance": max(abs(own - its) / its for own, its in pairs),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--window", type=int, default=1)
    parser.add_argument("--embedding", type=int, default=512)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--lesson", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.lesson is not None:
        lesson(args.lesson, args.device)
        return
    from ddp_hpc.training.process_group.devices import device_kind

    rows = measure(args.steps, device_kind(args.device), args.window, args.embedding)
    print(table(COLUMNS, rows))
    results_output.save(results_output.document("step", rows), args.json)


if __name__ == "__main__":
    main()
