"""Runs one optimizer step, and collects the steps whose losses are still on the device."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ddp_hpc.data.step_shards import Position, Share, weight
from ddp_hpc.training.health.heartbeat import Heartbeat
from ddp_hpc.training.health.rank_report import RankReport, RankReports
from ddp_hpc.training.input.batch_loader import Batch
from ddp_hpc.training.nonfinite_values import raise_bad_gradients
from ddp_hpc.training.optimization.config import OptimizationConfig
from ddp_hpc.training.optimization.optimizers import lr_at, set_lr
from ddp_hpc.training.optimization.step_graph import StepGraph
from ddp_hpc.training.parallel.make_strategy import Strategy
from ddp_hpc.training.process_group.group import Group
from ddp_hpc.training.telemetry.metrics_file import StepRecord
from ddp_hpc.training.telemetry.step_clock import StepClock
from ddp_hpc.training.telemetry.trace_annotations import annotated

# The host queues at most this number of steps on a GPU, because the batch of each queued step uses memory.
_MOST_QUEUED_STEPS = 4


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


@dataclass(frozen=True)
class _Sent:
    """Steps whose losses the ranks are exchanging."""

    records: list[dict[str, Any]]
    times: list[tuple[float, float]]
    gathered: Tensor
    """The losses and the report of each rank, in host memory, after `is_copied`."""
    is_copied: torch.Event | None


@dataclass
class Pending:
    """Steps whose losses the ranks have not exchanged yet: several steps are exchanged at once.

    With a `delay` of one step, the ranks exchange the losses of all steps except the last one, and read them
    after the next step. A GPU then never waits for the host, because the next step is already queued.
    """

    delay: int = 0
    losses: list[Tensor] = field(default_factory=list)
    """The sum of the losses of this rank's samples, one scalar per step."""
    records: list[dict[str, Any]] = field(default_factory=list)
    _sent: _Sent | None = None
    _rated_samples: int = 0
    _rated_s: float = 0.0

    @property
    def is_sent(self) -> bool:
        """Whether `receive` must be called."""
        return self._sent is not None

    def send(
        self, group: Group, clock: StepClock, report: Callable[[float], RankReport], *, whole: bool
    ) -> None:
        """Starts the exchange of the pending steps; `whole` includes the last `delay` steps.

        Does nothing if there are no such steps. `report` creates this rank's report from the mean time of
        these steps. Collective: every rank must call this.
        """
        delay = 0 if whole else self.delay
        num = len(self.losses) - delay
        if num <= 0:
            return
        own = torch.stack(self.losses[:num]).double()
        times = clock.read(delay)  # waits until the device has completed these steps
        step_s = sum(step_s for _, step_s in times) / num
        # The losses are gathered and then summed in rank order, because the last bit of an all-reduce can
        # depend on the size of the message.
        gathered = group.gather(torch.cat([own, _on_device(report(step_s), group.device)]))
        self._sent = _Sent(self.records[:num], times, *_copied_to_host(gathered))
        del self.losses[:num], self.records[:num]

    def receive(self) -> ExchangedSteps:
        """Returns the steps that were sent, the same on every rank. Waits for the exchange."""
        sent = self._sent
        assert sent is not None
        self._sent = None
        if sent.is_copied is not None:
            sent.is_copied.synchronize()
        num = len(sent.records)
        losses = sent.gathered[:, :num]
        sums = losses.sum(dim=0).tolist()
        records = [
            StepRecord(loss=total / record["samples"], data_s=data_s, step_s=step_s, **record)
            for total, record, (data_s, step_s) in zip(sums, sent.records, sent.times, strict=True)
        ]
        bad = (~losses.isfinite()).T.nonzero()  # rows (step, rank), in the order of steps
        non_finite = None
        if len(bad):
            index, rank = bad[0].tolist()
            non_finite = NonFiniteLoss(records[index].step, rank, losses[rank, index].item())
        self._rated_samples += sum(record.samples for record in records)
        self._rated_s += sum(record.step_s for record in records)
        return ExchangedSteps(records, RankReports(sent.gathered[:, num:]), non_finite)

    def rate(self) -> float:
        """Returns the number of samples per second over all ranks since the last call."""
        rate = self._rated_samples / self._rated_s if self._rated_s else math.inf
        self._rated_samples, self._rated_s = 0, 0.0
        return rate


def _on_device(values: Sequence[float], device: torch.device) -> Tensor:
    """Returns the values as a float64 tensor on the device; the host does not wait for the copy."""
    is_gpu = device.type in ("cuda", "xpu")
    return torch.tensor(values, dtype=torch.float64, pin_memory=is_gpu).to(device, non_blocking=True)


def _copied_to_host(values: Tensor) -> tuple[Tensor, torch.Event | None]:
    """Starts the copy to pinned host memory; returns the copy and the event after which it is complete."""
    if values.device.type == "cpu":
        return values, None
    copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    copy.copy_(values, non_blocking=True)
    is_copied = torch.Event(values.device.type)
    is_copied.record()
    return copy, is_copied


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

    def __post_init__(self) -> None:
        eager_steps = self.strategy.eager_steps
        self._graph = StepGraph(eager_steps) if self.config.cuda_graph else None

    def one_step(self, position: Position, shares: tuple[Share, ...], pending: Pending) -> None:
        """Computes the gradients of all micro-batches and updates the parameters once. Collective.

        Raises:
            DdpHpcError: with --check-gradients, a gradient is not finite; nothing was updated.
        """
        self.clock.wait_for_steps(_MOST_QUEUED_STEPS)
        self.clock.start_step()
        step, samples = position.step + 1, shares[0].step_samples
        lr = lr_at(self.config, position.step, self.lr_ranks, self.total_steps)
        set_lr(self.strategy.optimizer, lr)
        batches = self._load(step, shares)
        if self._graph is None:
            loss_sum = self._compute(step, shares, self._at, batches)
        else:
            # Events of the clock cannot be read if they are part of a graph.
            compute = partial(self._compute, step, shares, self.heartbeat.at)
            loss_sum = self._graph.run(samples, batches, compute)
            self.heartbeat.at(step, "optimizer")  # a replay does not report its phases
        self.strategy.after_update(step)
        self.clock.end_step(samples)
        pending.losses.append(loss_sum)
        pending.records.append({"step": step, "epoch": position.epoch + 1, "lr": lr, "samples": samples})

    def close(self) -> None:
        """Frees what must not outlive the process group."""
        if self._graph is not None:
            self._graph.drop()

    def _load(self, step: int, shares: tuple[Share, ...]) -> Iterator[Batch]:
        """Yields the micro-batches in the data types of the model."""
        for i in range(len(shares)):
            self.micro_batch = i
            self.heartbeat.at(step, "data")
            with self.clock.data(), annotated("data"):
                inputs = self.strategy.task.inputs(*next(self.batches), self.dtype)
            yield inputs

    def _compute(
        self,
        step: int,
        shares: tuple[Share, ...],
        at: Callable[[int, str], None],
        batches: Iterable[Batch],
    ) -> Tensor:
        """Runs the whole step on the device; returns the sum of the losses of this rank's samples."""
        strategy, num = self.strategy, len(shares)
        strategy.optimizer.zero_grad(set_to_none=True)
        loss_sum = torch.zeros((), dtype=self.dtype, device=self.group.device)
        for i, (share, (src, tgt)) in enumerate(zip(shares, batches, strict=True)):
            factor = weight(share, strategy.mesh.data_size)
            loss = strategy.micro_batch(src, tgt, factor, i + 1 == num, partial(at, step))
            if strategy.mesh.counts_loss:
                loss_sum += loss * (share.stop - share.start)
        at(step, "optimizer")
        with annotated("optimizer"):
            strategy.finish_gradients()
            self._check_and_clip(step, src, tgt)
            strategy.precision.update(strategy.optimizer)
        return loss_sum

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
