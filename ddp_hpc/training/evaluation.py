"""Evaluates the model on the test split; each sample counts exactly once for any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from ddp_hpc.data.samples import Samples
from ddp_hpc.training.input.batch_loader import Loader
from ddp_hpc.training.parallel.make_strategy import Strategy
from ddp_hpc.training.process_group.group import contiguous


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation: mean loss and, if the task counts them, the number of correct answers."""

    num_samples: int
    loss: float
    num_correct: int | None
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The task's other metrics, each averaged over all samples."""

    @property
    def accuracy(self) -> float | None:
        """The fraction of correct answers; None if the task does not count correct answers."""
        return None if self.num_correct is None else self.num_correct / self.num_samples

    def __str__(self) -> str:
        """Formats the result, for example as `loss 0.0512 accuracy 98.61 % (355 of 360)`."""
        text = f"loss {self.loss:.4f}"
        if self.accuracy is not None:
            text += f" accuracy {100 * self.accuracy:.2f} % ({self.num_correct} of {self.num_samples})"
        return text + "".join(f" {name} {value:.4f}" for name, value in self.metrics.items())


@torch.no_grad()
def evaluate(
    strategy: Strategy,
    samples: Samples,
    *,
    batch_size: int,
    dtype: torch.dtype,
    timeout_s: float,
    tick: Callable[[], None],
) -> Evaluation:
    """Returns the model's loss and metrics on all samples. Collective: every rank must call this.

    Each rank evaluates a slice of the samples. The slices differ in length if the number of samples is not
    divisible by the number of ranks. If a forward pass is collective, all ranks run the same number of
    passes: a rank without remaining samples runs them on other samples and discards the results.
    `tick` is called before each batch.
    """
    task, group, mesh = strategy.task, strategy.group, strategy.mesh
    names = list(task.metrics)
    sums = torch.zeros(2 + len(names), dtype=torch.float64, device=group.device)
    only_loss = strategy.fuses_loss and task.num_correct is None and not names
    was_training = strategy.model.training
    strategy.model.eval()
    _broadcast_buffers(strategy)
    slices = _slices(
        samples.num_samples, mesh.data_rank, mesh.data_size, batch_size, strategy.forward_is_collective
    )
    wanted = (numbers for numbers, _ in slices)
    loader = Loader(samples, group.device, timeout_s=timeout_s)
    for batch, (_, counts) in zip(loader.batches(wanted), slices, strict=True):
        tick()
        src, tgt = task.inputs(*batch, dtype)
        if only_loss:
            loss = strategy.local_loss(src, tgt)
        else:
            output = strategy.output(src, tgt)
        if counts and mesh.counts_loss:
            sums[0] += (loss if only_loss else task.loss(output, tgt)) * len(tgt)
            if task.num_correct is not None:
                sums[1] += task.num_correct(output, tgt)
            for i, name in enumerate(names, start=2):
                sums[i] += task.metrics[name](output, tgt)
    strategy.model.train(was_training)
    num = samples.num_samples
    loss_sum, num_correct, *others = group.sum(sums).tolist()
    correct = round(num_correct) if task.num_correct is not None else None
    means = {name: total / num for name, total in zip(names, others, strict=True)}
    return Evaluation(num, loss_sum / num, correct, means)


def _broadcast_buffers(strategy: Strategy) -> None:
    """Copies the first replica's buffers to all others, because running means of batch norms can differ.

    Collective: every rank must call this.
    """
    mesh = strategy.mesh
    if mesh.data_size == 1:
        return
    group = mesh.sub("dp").get_group() if mesh.has("pp") else None
    for buffer in strategy.model.buffers():
        with contiguous(buffer) as sent:
            dist.broadcast(sent, group=group, group_src=0)


def _slices(
    num_samples: int, rank: int, size: int, batch_size: int, equally_many: bool
) -> list[tuple[NDArray[np.int64], bool]]:
    """Returns the sample numbers of each batch of this rank, and whether the batch counts in the result."""
    start, stop = (num_samples * (rank + i) // size for i in (0, 1))
    firsts = range(start, stop, batch_size)
    batches = [(np.arange(first, min(first + batch_size, stop), dtype=np.int64), True) for first in firsts]
    most = math.ceil(math.ceil(num_samples / size) / batch_size) if equally_many else 0
    # The repeated batch is a full one, because a pipeline compiles a schedule for each batch size.
    spare = np.zeros(min(batch_size, num_samples), dtype=np.int64)
    return batches + [(spare, False)] * (most - len(batches))
