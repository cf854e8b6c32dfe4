"""A training of one process without a data file, for tests of single steps."""

from collections.abc import Iterator
from types import SimpleNamespace

import torch
from torch import Tensor

from ddp_hpc.data.step_shards import Position, rank_shares
from ddp_hpc.discovery.rank_communication import SingleComm
from ddp_hpc.discovery.world import World
from ddp_hpc.training.config import TrainConfig
from ddp_hpc.training.parallel.make_strategy import make_strategy
from ddp_hpc.training.process_group.group import Group
from ddp_hpc.training.step import Pending, Stepper
from ddp_hpc.training.tasks.task import Task
from ddp_hpc.training.telemetry.step_clock import StepClock

WORLD = World(rank=0, world_size=1, local_rank=0, local_size=1, hostname="n1", launcher="single")


def group_on(device: str) -> Group:
    return Group(
        world=WORLD, comm=SingleComm(), device=torch.device(device), backend="none", threads=1, placement=""
    )


class Steps:
    """Runs steps of a task on batches, which can differ in size."""

    def __init__(
        self, task: Task, batches: Iterator[tuple[Tensor, Tensor]], device: str = "cpu", **options: object
    ) -> None:
        self.config = TrainConfig.of(**options)
        self.group = group_on(device)
        self.strategy = make_strategy(task, self.group, self.config.parallel, self.config.optimization)
        self.pending = Pending()
        self.stepper = Stepper(
            self.config.optimization, self.group, batches, self.strategy, torch.float32,
            StepClock(self.group.device), SimpleNamespace(at=lambda *_: None), 1, 100,
        )  # fmt: skip
        self.position = Position()

    def step(self, batch_size: int = 4) -> None:
        """Runs one step with `batch_size` samples in each micro-batch."""
        num = batch_size * self.config.optimization.accumulate
        _, shares = next(rank_shares(num, batch_size, 1, 0, num, Position()))
        self.stepper.one_step(self.position, shares, self.pending)
        self.position = self.position.after(shares[0], 10**9)

    def losses(self) -> list[float]:
        return [loss.item() for loss in self.pending.losses]
