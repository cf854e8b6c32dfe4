"""Exact evaluation: each test sample counts once, however many ranks share the work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from ddp_hpc.data.samples import Samples
from ddp_hpc.training.group import Group
from ddp_hpc.training.loader import Loader
from ddp_hpc.training.models import Task


@dataclass(frozen=True)
class Evaluation:
    """Mean loss and, where the task has such a notion, the share of right answers."""

    num_samples: int
    loss: float
    num_correct: int | None

    @property
    def accuracy(self) -> float | None:
        """Right answers over samples; None where the task has none."""
        return None if self.num_correct is None else self.num_correct / self.num_samples

    def __str__(self) -> str:
        """`loss 0.0512 accuracy 98.61 % (355 of 360)`."""
        text = f"loss {self.loss:.4f}"
        if self.accuracy is not None:
            text += f" accuracy {100 * self.accuracy:.2f} % ({self.num_correct} of {self.num_samples})"
        return text


@torch.no_grad()
def evaluate(
    model: nn.Module,
    task: Task,
    samples: Samples,
    group: Group,
    *,
    batch_size: int,
    dtype: torch.dtype,
    timeout_s: float,
    tick: Callable[[], None],
) -> Evaluation:
    """The model's loss and accuracy on all samples. Collective: every rank must call this.

    Ranks take slices of different lengths where the number does not divide; the
    bare model is used, which has no collectives, so nobody waits for anybody
    before the sums at the end. `tick` is called before each batch.
    """
    world = group.world
    start, stop = (samples.num_samples * (world.rank + i) // world.world_size for i in (0, 1))
    sums = torch.zeros(2, dtype=torch.float64, device=group.device)
    was_training = model.training
    model.eval()
    wanted = (
        np.arange(first, min(first + batch_size, stop), dtype=np.int64)
        for first in range(start, stop, batch_size)
    )
    for src_read, tgt_read in Loader(samples, group.device, timeout_s=timeout_s).batches(wanted):
        tick()
        src, tgt = src_read.to(dtype), tgt_read.to(task.tgt_dtype(dtype))
        output = task.forward(model, src, tgt)
        sums[0] += task.loss(output, tgt) * len(tgt)
        if task.num_correct is not None:
            sums[1] += task.num_correct(output, tgt)
    model.train(was_training)
    loss_sum, num_correct = group.sum(sums).tolist()
    correct = round(num_correct) if task.num_correct is not None else None
    return Evaluation(samples.num_samples, loss_sum / samples.num_samples, correct)
