"""A program for ranks that saves a snapshot and prints the collectives of torch that each rank called."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

import ddp_hpc
from ddp_hpc.data.step_shards import Position
from ddp_hpc.training.config import TrainConfig
from ddp_hpc.training.run.lifecycle import manage_run
from ddp_hpc.training.run.resumable import Losses
from tests.training.one_step import trained_for_one_step


class Collectives(TorchDispatchMode):
    """Records the names of collectives, such as `c10d.gather_`."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            self.names.add(str(func.overloadpacket))
        return func(*args, **(kwargs or {}))


def main(argv: list[str]) -> None:
    """`argv`: the strategy."""
    [strategy] = argv
    config = TrainConfig.of(strategy=strategy, snapshot_dir=Path("run").resolve())
    with ddp_hpc.distributed(threads=1) as world:
        shared, _, _ = trained_for_one_step(config, world.group)
        with manage_run(config, world.group, world.progress, world.parts) as lifecycle:
            lifecycle.resume(lifecycle.open(), shared.state(), 2, shared.mesh)
            with Collectives() as found:
                lifecycle.check_parameters(1, shared.state(), lambda: None)
                lifecycle.save(Position(1), Losses(), shared.state(), lambda: None)
            lifecycle.finish(Position(1), "", lambda: None)
        # One write, so that lines of different ranks do not mix.
        os.write(1, f"collectives: {json.dumps(sorted(found.names))}\n".encode())
    raise SystemExit(0)
