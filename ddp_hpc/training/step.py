"""Runs one optimizer step, and collects the steps whose losses are still on the device."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from ddp_hpc.data.step_shards import Position, Share, weight
from ddp_hpc.training.health.heartbeat import Heartbeat
from ddp_hpc.training.health.nonfinite_values import raise_bad_gradients
from ddp_hpc.training.health.rank_report import RankReport, RankReports
from ddp_hpc.training.input.batch_loader import Batch
from ddp_hpc.training.optimization.config import OptimizationConfig
from ddp_hpc.training.optimization.optimizers import lr_at
from ddp_hpc.training.parallel.make_strategy import Strategy
from ddp_hpc.training.process_group.group import Group
from ddp_hpc.training.telemetry.metrics_file import StepRecord
from ddp_hpc.training.telemetry.step_clock import StepClock


@dataclass(frozen=True)
class NonFiniteLoss:
    """The first step with a non-finite loss, and the first rank that had it."""

    step: int
    rank: int
    loss: float

    def __str__(self) -> str:
        return f"step {self.step}: the loss of rank {self.rank} is {self.loss}"


@dataclass(frozen=True)
class ExchangedSteps:
    """The results of steps, after the ranks have exchanged them."""

    records: list[StepRecord]
    """The steps with their mean losses over all ranks and their times."""
    reports: RankReports
    non_finite: NonFiniteLoss | None


@dataclass
class Pending:
    """Steps whose losses the ranks have not exchanged yet: several steps are exchanged at once."""

    losses: list[Tensor] = field(default_factory=list)
    """The sum of the losses of this rank's samples, one scalar per step."""
    records: list[dict[str, Any]] = field(default_factory=list)
    _rated_samples: int = 0
    _rated_s: float = 0.0

    def exchange(
        self, group: Group, clock: StepClock, report: Callable[[float], RankReport]
    ) -> ExchangedSteps:
        """Returns the pending steps, the same on every rank, and clears them.

        `report` creates this rank's report from the mean time of these steps. Waits for the device.
        Collective: every rank must call this.
        """
        own = torch.stack(self.losses).double()
        own.tolist()  # this call waits for the device, so that the clock can be read afterwards
        times = clock.read()
        step_s = sum(step_s for _, step_s in times) / len(times)
        own_report = torch.tensor(report(step_s), dtype=torch.float64, device=group.device)
        # The losses are gathered and then summed in rank order, because the last bit of an all-reduce can
        # depend on the size of the message.
        gathered = group.gather(torch.cat([own, own_report])).cpu()
        losses = gathered[:, : len(own)]
        sums = losses.sum(dim=0).tolist()
        records = [
            StepRecord(loss=total / record["samples"], data_s=data_s, step_s=step_s, **record)
            for total, record, (data_s, step_s) in zip(sums, self.records, times, strict=True)
        ]
        bad = (~losses.isfinite()).T.nonzero()  # rows (step, rank), in the order of steps
        non_finite = None
        if len(bad):
            index, rank = bad[0].tolist()
            non_finite = NonFiniteLoss(records[index].step, rank, losses[rank, index].item())
        self._rated_samples += sum(record.samples for record in records)
        self._rated_s += sum(record.step_s for record in records)
        self.losses.clear()
        self.records.clear()
        return ExchangedSteps(records, RankReports(gathered[:, len(own) :]), non_finite)

    def rate(self) -> float:
        """Returns the number of samples per second over all ranks since the last call."""
        rate = self._rated_samples / self._rated_s if self._rated_s else math.inf
        self._rated_samples, self._rated_s = 0, 0.0
        return rate


@dataclass
class Stepper:
    """Runs optimizer steps."""

    config: OptimizationConfig
    group: Group
    batches: Iterator[Batch]
    strategy: Strategy
    dtype: torch.dtype
    clock: StepClock
    heartbeat: Heartbeat
    lr_ranks: int
    """The number of ranks from which --lr-scaling computes the learning rate."""
    total_steps: int
    """The step at which the learning-rate schedule ends."""
    micro_batch: int = 0
    """The index of the current micro-batch of the step, or of the micro-batch that failed."""

    def one_step(self, position: Position, shares: tuple[Share, ...], pending: Pending) -> None:
        """Computes the gradients of all micro-batches and updates the parameters once. Collective.

        Raises:
            DdpHpcError: with --check-gradients, a gradient is not finite; nothing was updated.
        """
        strategy, data_size = self.strategy, self.strategy.mesh.data_size
        self.clock.start_step()
        lr = lr_at(self.config, position.step, self.lr_ranks, self.total_steps)
        for parameters in strategy.optimizer.param_groups:
            parameters["lr"] = lr
        strategy.optimizer.zero_grad(set_to_none=True)
        loss_sum = torch.zeros((), dtype=self.dtype, device=self.group.device)
        step = position.step + 1
        at = partial(self._at, step)
        for i, share in enumerate(shares):
            self.micro_batch = i
            self.heartbeat.at(step, "data")
            with self.clock.data(), record_function("data"):
                src, tgt = strategy.task.inputs(*next(self.batches), self.dtype)
            factor = weight(share, data_size)
            loss = strategy.micro_batch(src, tgt, factor, i + 1 == len(shares), at)
            if self.config.uses_cuda_graphs and i == 0 and len(shares) > 1:
                strategy.keep_gradients()
            if strategy.mesh.counts_loss:
                loss_sum += loss * (share.stop - share.start)
        self.heartbeat.at(step, "optimizer")
        with record_function("optimizer"):
            strategy.finish_gradients()
            self._check_and_clip(step, src, tgt)
            strategy.precision.update(strategy.optimizer)
        self.clock.end_step(shares[0].step_samples)
        pending.losses.append(loss_sum)
        samples = shares[0].step_samples
        pending.records.append({"step": step, "epoch": position.epoch + 1, "lr": lr, "samples": samples})

    def _check_and_clip(self, step: int, src: Tensor, tgt: Tensor) -> None:
        config, strategy = self.config, self.strategy
        if config.clip_norm is None and not config.check_gradients:
            return
        strategy.precision.unscale(strategy.optimizer)
        norm = strategy.gradient_norm()
        if config.check_gradients and not torch.isfinite(norm).item():
            raise_bad_gradients(strategy, step, src, tgt)
        if config.clip_norm is not None:
            strategy.limit_gradients(norm, config.clip_norm)

    def _at(self, step: int, phase: str) -> None:
        self.heartbeat.at(step, phase)
        if phase == "backward":
            self.clock.end_forward()
