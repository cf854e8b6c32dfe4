"""A small Transformer after one step, for tests that save its state."""

from __future__ import annotations

import torch
from torch import Tensor

from ddp_hpc.training.config import TrainConfig
from ddp_hpc.training.parallel.make_strategy import Strategy, make_strategy
from ddp_hpc.training.process_group.group import Group
from ddp_hpc.training.tasks.builtin_models import TASKS
from ddp_hpc.training.tasks.task import SampleSpec, make_task


def trained_for_one_step(config: TrainConfig, group: Group) -> tuple[Strategy, Tensor, Tensor]:
    """Returns the strategy after the step, and the src and tgt of its samples. Collective."""
    task = make_task("transformer", TASKS["transformer"], SampleSpec((1, 16), (3, 16), None), 0.0, {}, 0)
    shared = make_strategy(task, group, config.parallel, config.optimization)
    src, tgt = torch.rand(2, 1, 16), torch.rand(2, 3, 16)
    shared.micro_batch(src, tgt, 1.0, True, lambda _: None)
    shared.finish_gradients()
    shared.optimizer.step()
    return shared, src, tgt
