"""The training loop: every rank runs it, and step s sees the same samples whatever their number.

A step is a global batch: `batch_size * world_size * accumulate` samples, dealt to
ranks by `ddp_hpc.data.batches`. Gradients and losses are means over the samples
of the step, so an uneven tail needs neither padding nor a special case.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_hpc.data.batches import Share, micro_batches, steps_per_epoch, weight
from ddp_hpc.data.order import EpochOrder
from ddp_hpc.data.samples import Samples
from ddp_hpc.training.clock import StepClock
from ddp_hpc.training.config import TrainConfig
from ddp_hpc.training.evaluate import Evaluation, evaluate
from ddp_hpc.training.group import Group
from ddp_hpc.training.loader import Batch, Loader
from ddp_hpc.training.metrics import MetricsFile, StepRecord
from ddp_hpc.training.models import TASKS, SampleSpec, Task, build_model
from ddp_hpc.training.progress import Progress
from ddp_hpc.world.topology import World


@dataclass(frozen=True, kw_only=True)
class Result:
    """What came of a run. `samples_per_s` leaves out the first step, which warms things up."""

    num_parameters: int
    steps: int
    samples: int
    wall_s: float
    samples_per_s: float
    first_loss: float
    final_loss: float
    test: Evaluation | None


@dataclass
class _Pending:
    """Steps whose losses are still on the device: summed over ranks a few at a time, never per step."""

    losses: list[Tensor] = field(default_factory=list)  # this rank's sum over its samples, a scalar each
    records: list[dict[str, Any]] = field(default_factory=list)


def train(config: TrainConfig, group: Group, samples: Samples, progress: Progress) -> Result:
    """Trains the configured model on the samples. Collective: every rank must call this.

    Raises:
        RequestError: where the samples do not fit the model.
    """
    world_size, device = group.world.world_size, group.device
    task = TASKS[config.model]
    dtype = torch.float64 if samples.src_dtype == np.float64 else torch.float32
    spec = SampleSpec(samples.src_shape, samples.tgt_shape, samples.num_classes)
    bare = build_model(config.model, spec, config.dropout, config.seed, dtype).to(device)
    model = _wrap(bare, group)
    # Ranks draw different dropout masks from here on; the parameters above are the same on all.
    torch.manual_seed((config.seed * 1_000_003 + group.world.rank + 1) % 2**63)
    optimizer = torch.optim.Adam(
        bare.parameters(), lr=config.scaled_lr(world_size), fused=device.type == "cuda" or None
    )
    num_parameters = sum(p.numel() for p in bare.parameters())
    progress.say(
        f"model: {config.model}, {num_parameters:,} parameters; Adam, lr {config.scaled_lr(world_size):g} "
        f"({config.lr:g}, {config.lr_scaling} scaling over {world_size})"
    )
    per_epoch = steps_per_epoch(samples.num_samples, config.batch_size, world_size, config.accumulate)
    total = min(config.epochs * per_epoch, config.max_steps or sys.maxsize)
    metrics = MetricsFile(config.metrics if group.world.rank == 0 else None)
    clock, pending = StepClock(device), _Pending()
    loader = Loader(samples, device, workers=config.workers, timeout_s=config.timeout_s)
    batches = loader.batches(_wanted(config, group.world, samples.num_samples, total))
    run = _Run(config, group, batches, task, model, optimizer, dtype, clock)
    first_loss = final_loss = math.nan
    done_samples, warned = 0, False
    test: Evaluation | None = None
    start_s = time.perf_counter()
    for step in range(total):
        epoch, in_epoch = divmod(step, per_epoch)
        shares = micro_batches(
            samples.num_samples, config.batch_size, world_size, group.world.rank, config.accumulate, in_epoch
        )
        run.one_step(step, shares, pending, epoch)
        done_samples += shares[0].step_samples
        last_of_run = step + 1 == total
        if (step + 1) % config.log_every == 0 or last_of_run or step == 0:
            records = _settle(pending, group, clock)
            metrics.write(records)
            final_loss = records[-1].loss
            if not warned and (bad := next((r for r in records if not math.isfinite(r.loss)), None)):
                warned = True
                progress.say(
                    f"warning: the loss is {bad.loss} at step {bad.step}: look at the data and the lr"
                )
            first_loss = records[0].loss if step == 0 else first_loss
            seconds = sum(r.step_s for r in records)
            rate = sum(r.samples for r in records) / seconds if seconds else math.inf
            progress.step(step + 1, total, f"{epoch + 1}/{config.epochs}", final_loss, rate)
        if samples.test is not None and (last_of_run or in_epoch + 1 == per_epoch):
            test = evaluate(
                bare,
                task,
                samples.test,
                group,
                batch_size=config.batch_size,
                dtype=dtype,
                timeout_s=config.timeout_s,
            )
            progress.say(f"epoch {epoch + 1}/{config.epochs} test: {test}")
    wall_s = time.perf_counter() - start_s
    batches.close()
    metrics.close()
    return Result(
        num_parameters=num_parameters,
        steps=total,
        samples=done_samples,
        wall_s=wall_s,
        samples_per_s=clock.samples_per_s(),
        first_loss=first_loss,
        final_loss=final_loss,
        test=test,
    )


def _wanted(
    config: TrainConfig, world: World, num_samples: int, num_steps: int
) -> Iterator[NDArray[np.int64]]:
    """The numbers of the samples of each micro-batch that this rank takes, over the whole run.

    A rank without a sample in an uneven tail takes one all the same, of weight 0:
    the others' allreduce waits for its backward.
    """
    per_epoch = steps_per_epoch(num_samples, config.batch_size, world.world_size, config.accumulate)
    for step in range(num_steps):
        epoch, in_epoch = divmod(step, per_epoch)
        if in_epoch == 0:
            order = EpochOrder(num_samples, config.seed, epoch, config.shuffle)
        for share in micro_batches(
            num_samples, config.batch_size, world.world_size, world.rank, config.accumulate, in_epoch
        ):
            yield order.take(min(share.start, share.stop - 1), share.stop)


def _wrap(model: nn.Module, group: Group) -> nn.Module:
    if group.backend == "none":
        return model
    ids = None if group.device.type == "cpu" else [group.device]
    return DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)


@dataclass
class _Run:
    """The parts that one step needs."""

    config: TrainConfig
    group: Group
    batches: Iterator[Batch]
    task: Task
    model: nn.Module
    optimizer: torch.optim.Optimizer
    dtype: torch.dtype
    clock: StepClock

    def one_step(self, step: int, shares: tuple[Share, ...], pending: _Pending, epoch: int) -> None:
        """Gradients of all micro-batches, one update. Collective: every rank must call this."""
        world_size = self.group.world.world_size
        self.clock.start_step()
        lr = self.config.lr_at(step, world_size)
        for parameters in self.optimizer.param_groups:
            parameters["lr"] = lr
        self.optimizer.zero_grad(set_to_none=True)
        loss_sum = torch.zeros((), dtype=self.dtype, device=self.group.device)
        for i, share in enumerate(shares):
            with self.clock.data():
                src, tgt = next(self.batches)
                src, tgt = src.to(self.dtype), tgt.to(self.task.tgt_dtype(self.dtype))
            with self._sync(last=i + 1 == len(shares)):
                loss = self.task.loss(self.task.forward(self.model, src, tgt), tgt)
                factor = weight(share, world_size)
                # An even batch has factor 1 and takes the very path of a plain loop.
                (loss if factor == 1.0 else loss * factor).backward()  # type: ignore[no-untyped-call]
            loss_sum += loss.detach() * (share.stop - share.start)
        if self.config.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip_norm)
        self.optimizer.step()
        self.clock.end_step(shares[0].step_samples)
        pending.losses.append(loss_sum)
        pending.records.append(
            {"step": step + 1, "epoch": epoch + 1, "lr": lr, "samples": shares[0].step_samples}
        )

    def _sync(self, last: bool) -> AbstractContextManager[None]:
        """Gradients cross the network once a step, with its last micro-batch."""
        if last or not isinstance(self.model, DistributedDataParallel):
            return nullcontext()
        return self.model.no_sync()


def _settle(pending: _Pending, group: Group, clock: StepClock) -> list[StepRecord]:
    """The pending steps with their losses summed over ranks and their times read. Collective."""
    sums = group.sum(torch.stack(pending.losses)).tolist()
    times = clock.read()
    records = [
        StepRecord(loss=total / record["samples"], data_s=data_s, step_s=step_s, **record)
        for total, record, (data_s, step_s) in zip(sums, pending.records, times, strict=True)
    ]
    pending.losses.clear()
    pending.records.clear()
    return records
