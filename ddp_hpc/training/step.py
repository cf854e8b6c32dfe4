"""One optimizer step, and what is known of the steps whose losses are still on the device."""

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
from ddp_hpc.training.health.rank_report import RankReport
from ddp_hpc.training.input.batch_loader import Batch
from ddp_hpc.training.optimization.config import OptimizationConfig
from ddp_hpc.training.optimization.optimizers import lr_at
from ddp_hpc.training.parallel.make_strategy import Strategy
from ddp_hpc.training.process_group.group import Group
from ddp_hpc.training.telemetry.metrics_file import StepRecord
from ddp_hpc.training.telemetry.step_clock import StepClock


@dataclass(frozen=True)
class NonFiniteLoss:
    """The first of the settled steps whose loss is no finite number, and the first rank that had it."""

    step: int
    rank: int
    loss: float

    def __str__(self) -> str:
        return f"step {self.step}: the loss of rank {self.rank} is {self.loss}"


@dataclass(frozen=True)
class Settled:
    """What all ranks know of steps that were pending."""

    records: list[StepRecord]
    """The steps with their mean losses over all ranks and their times."""
    reports: list[RankReport]
    """One per rank."""
    non_finite: NonFiniteLoss | None


@dataclass
class Pending:
    """Steps whose losses ranks have not told each other yet: they do a few at a time, never per step."""

    losses: list[Tensor] = field(default_factory=list)  # this rank's sum over what it reports, a scalar each
    records: list[dict[str, Any]] = field(default_factory=list)
    _rated_samples: int = 0
    _rated_s: float = 0.0

    def settle(self, group: Group, clock: StepClock, report: Callable[[float], RankReport]) -> Settled:
        """The pending steps, the same on every rank; none is pending then.

        `report` makes this rank's report from the mean time of these steps. Waits for the device.
        Collective: every rank must call this.
        """
        own = torch.stack(self.losses).double()
        own.tolist()  # the device is done with these steps: the clock may be read
        times = clock.read()
        step_s = sum(step_s for _, step_s in times) / len(times)
        told = torch.tensor(report(step_s), dtype=torch.float64, device=group.device)
        # Summed here by rank: in a reduction the last bit may depend on what else is sent with it.
        everyone = group.gather(torch.cat([own, told])).cpu()
        losses = everyone[:, : len(own)]
        sums = losses.sum(dim=0).tolist()
        records = [
            StepRecord(loss=total / record["samples"], data_s=data_s, step_s=step_s, **record)
            for total, record, (data_s, step_s) in zip(sums, self.records, times, strict=True)
        ]
        bad = (~losses.isfinite()).T.nonzero()  # (step, rank), the first step first
        non_finite = None
        if len(bad):
            place, rank = bad[0].tolist()
            non_finite = NonFiniteLoss(records[place].step, rank, losses[rank, place].item())
        self._rated_samples += sum(record.samples for record in records)
        self._rated_s += sum(record.step_s for record in records)
        self.losses.clear()
        self.records.clear()
        reports = [RankReport(*one) for one in everyone[:, len(own) :].tolist()]
        return Settled(records, reports, non_finite)

    def rate(self) -> float:
        """Samples a second of all ranks, since the last call."""
        rate = self._rated_samples / self._rated_s if self._rated_s else math.inf
        self._rated_samples, self._rated_s = 0, 0.0
        return rate


@dataclass
class Stepper:
    """The parts that one step needs."""

    config: OptimizationConfig
    group: Group
    batches: Iterator[Batch]
    strategy: Strategy
    dtype: torch.dtype
    clock: StepClock
    heart: Heartbeat
    lr_ranks: int
    """Ranks for which the learning rate is scaled."""
    total_steps: int
    """At which the rate's schedule ends."""
    micro_batch: int = 0
    """Of the step, the one that it is at, or was at when it failed."""

    def one_step(self, position: Position, shares: tuple[Share, ...], pending: Pending) -> None:
        """Gradients of all micro-batches, one update. Collective: every rank must call this.

        Raises:
            DdpHpcError: with --check-gradients, for one that is no number; without an update.
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
            self.heart.at(step, "data")
            with self.clock.data(), record_function("data"):
                src, tgt = strategy.task.inputs(*next(self.batches), self.dtype)
            factor = weight(share, data_size)
            loss = strategy.micro_batch(src, tgt, factor, i + 1 == len(shares), at)
            if self.config.uses_cuda_graphs and i == 0 and len(shares) > 1:
                strategy.keep_gradients()
            if strategy.mesh.counts_loss:
                loss_sum += loss * (share.stop - share.start)
        self.heart.at(step, "optimizer")
        with record_function("optimizer"):
            strategy.finish_gradients()
            self._look_at_gradients(step, src, tgt)
            strategy.precision.update(strategy.optimizer)
        self.clock.end_step(shares[0].step_samples)
        pending.losses.append(loss_sum)
        pending.records.append(
            {
                "step": step,
                "epoch": position.epoch + 1,
                "lr": lr,
                "samples": shares[0].step_samples,
            }
        )

    def _look_at_gradients(self, step: int, src: Tensor, tgt: Tensor) -> None:
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
        self.heart.at(step, phase)
        if phase == "backward":
            self.clock.computed()
