"""A program for ranks that saves a state twice: as a snapshot, and with torch.distributed.checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch.distributed.checkpoint as dcp

import ddp_hpc
from ddp_hpc.data.in_memory import samples_of_arrays
from ddp_hpc.data.step_shards import Position
from ddp_hpc.training.config import TrainConfig
from ddp_hpc.training.run.lifecycle import manage_run
from ddp_hpc.training.run.resumable import Losses
from ddp_hpc.training.snapshots.training_state import live_tensors, optimizer_tensors
from tests.training.one_step import trained_for_one_step


def main(argv: list[str]) -> None:
    """`argv`: the strategy."""
    [strategy] = argv
    folder = Path("ours").resolve()
    config = TrainConfig.of(strategy=strategy, snapshot_dir=folder)
    with ddp_hpc.distributed(threads=1) as world:
        shared, src, tgt = trained_for_one_step(config, world.group)
        samples = samples_of_arrays(src.numpy(), tgt.numpy())
        with manage_run(config, world.group, world.progress, world.parts) as lifecycle:
            lifecycle.resume(lifecycle.open(), shared.state(), samples.num_samples, shared.mesh)
            lifecycle.save(Position(1), Losses(), shared.state(), lambda: None)
            lifecycle.finish(Position(1), "", lambda: None)
        model = live_tensors(shared.bare)
        state = {"model": model, "optimizer": optimizer_tensors(model, [shared.optimizer])}
        dcp.save(state, checkpoint_id=Path("dcp").resolve())
    raise SystemExit(0)
