"""A program for ranks that measures the memory of a save on each rank, relative to its part of the state."""

from __future__ import annotations

import ctypes
import gc
import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ddp_hpc
from ddp_hpc.data.in_memory import samples_of_arrays
from ddp_hpc.data.step_shards import Position
from ddp_hpc.training.config import TrainConfig
from ddp_hpc.training.health.run_lifecycle import Losses, manage_run
from ddp_hpc.training.parallel.make_strategy import make_strategy
from ddp_hpc.training.tasks.task import Task

WIDTH, LAYERS = 512, 24
_M_MMAP_THRESHOLD = -3  # A parameter of mallopt(3), from malloc.h.


def resident_bytes(name: str) -> int:
    """Reads `VmRSS`, or `VmHWM` for its peak since the last reset."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")  # proc_pid_clear_refs(5)


def measure(world: Any, strategy: str, folder: Path) -> dict[str, list[float]]:
    """The additional memory at the peaks of the first and second save, by rank."""
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    config = TrainConfig.of(strategy=strategy, snapshot_dir=folder)
    shared = make_strategy(Task(model=model), world.group, config.parallel, config.optimization)
    src = torch.rand(2, WIDTH)
    shared.micro_batch(src, src, 1.0, True, lambda _: None)
    shared.finish_gradients()
    shared.optimizer.step()
    shared.optimizer.zero_grad()
    samples = samples_of_arrays(src.numpy(), src.numpy())
    found = {}
    with manage_run(config, world.group, world.progress, world.parts) as lifecycle:
        lifecycle.resume(lifecycle.open(), shared.state(), samples.num_samples, shared.mesh)
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        # Parameters and the two states of Adam, but not the gradients.
        own_bytes = shared.state_bytes()
        before = resident_bytes("VmRSS")
        for number, what in enumerate(("first", "second"), start=1):
            reset_peak()
            lifecycle.save(Position(number), Losses(), shared.state(), samples.num_samples, lambda: None)
            lifecycle.finish(Position(number), "", lambda: None)
            taken = (resident_bytes("VmHWM") - before) / own_bytes
            found[what] = world.gather(torch.tensor(taken)).tolist()
    return found


def main(argv: list[str]) -> None:
    """`argv`: the strategies, and the file for the results."""
    *strategies, results = argv
    with ddp_hpc.distributed(threads=1) as world:
        # Freed memory is returned immediately, so that the next save cannot reuse it.
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 2**16)
        found = {name: measure(world, name, Path(name).resolve()) for name in strategies}
        if world.is_first:
            Path(results).write_text(json.dumps(found))
    raise SystemExit(0)
