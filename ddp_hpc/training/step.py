"""One optimizer step, and what is known of the steps whose losses are still on the device."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_hpc.data.batches import Position, Share, weight
from ddp_hpc.training.clock import StepClock
from ddp_hpc.training.config import TrainConfig
from ddp_hpc.training.group import Group
from ddp_hpc.training.heartbeat import Heartbeat
from ddp_hpc.training.loader import Batch
from ddp_hpc.training.metrics import StepRecord
from ddp_hpc.training.models import Task


@dataclass
class Pending:
    """Steps whose losses ranks have not told each other yet: they do a few at a time, never per step."""

    losses: list[Tensor] = field(default_factory=list)  # this rank's sum over its samples, a scalar each
    records: list[dict[str, Any]] = field(default_factory=list)
    _rated_samples: int = 0
    _rated_s: float = 0.0

    def settle(
        self, group: Group, clock: StepClock, signs: Callable[[float], list[float]]
    ) -> tuple[list[StepRecord], list[list[float]]]:
        """The pending steps with their mean losses over all ranks and their times; and every rank's signs.

        `signs` gets the mean time of these steps. Waits for the device.
        Collective: every rank must call this.
        """
        own = torch.stack(self.losses).double()
        own.tolist()  # the device is done with these steps: the clock may be read
        times = clock.read()
        step_s = sum(step_s for _, step_s in times) / len(times)
        told = torch.tensor(signs(step_s), dtype=torch.float64, device=group.device)
        # Summed here by rank: in a reduction the last bit may depend on what else is sent with it.
        everyone = group.gather(torch.cat([own, told])).cpu()
        sums = everyone[:, : len(own)].sum(dim=0).tolist()
        records = [
            StepRecord(loss=total / record["samples"], data_s=data_s, step_s=step_s, **record)
            for total, record, (data_s, step_s) in zip(sums, self.records, times, strict=True)
        ]
        self._rated_samples += sum(record.samples for record in records)
        self._rated_s += sum(record.step_s for record in records)
        self.losses.clear()
        self.records.clear()
        return records, everyone[:, len(own) :].tolist()

    def rate(self) -> float:
        """Samples a second of all ranks, since the last call."""
        rate = self._rated_samples / self._rated_s if self._rated_s else math.inf
        self._rated_samples, self._rated_s = 0, 0.0
        return rate


@dataclass
class Stepper:
    """The parts that one step needs."""

    config: TrainConfig
    group: Group
    batches: Iterator[Batch]
    task: Task
    model: nn.Module
    optimizer: torch.optim.Optimizer
    dtype: torch.dtype
    clock: StepClock
    heart: Heartbeat
    lr_ranks: int
    """Ranks for which the learning rate is scaled."""

    def one_step(self, position: Position, shares: tuple[Share, ...], pending: Pending) -> None:
        """Gradients of all micro-batches, one update. Collective: every rank must call this."""
        world_size = self.group.world.world_size
        self.clock.start_step()
        lr = self.config.lr_at(position.step, self.lr_ranks)
        for parameters in self.optimizer.param_groups:
            parameters["lr"] = lr
        self.optimizer.zero_grad(set_to_none=True)
        loss_sum = torch.zeros((), dtype=self.dtype, device=self.group.device)
        step = position.step + 1
        for i, share in enumerate(shares):
            self.heart.at(step, "data")
            with self.clock.data():
                src, tgt = next(self.batches)
                src, tgt = src.to(self.dtype), tgt.to(self.task.tgt_dtype(self.dtype))
            with self._sync(last=i + 1 == len(shares)):
                self.heart.at(step, "forward")
                loss = self.task.loss(self.task.forward(self.model, src, tgt), tgt)
                factor = weight(share, world_size)
                self.heart.at(step, "backward")
                # An even batch has factor 1 and takes the very path of a plain loop.
                (loss if factor == 1.0 else loss * factor).backward()  # type: ignore[no-untyped-call]
            loss_sum += loss.detach() * (share.stop - share.start)
        self.heart.at(step, "optimizer")
        if self.config.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip_norm)
        self.optimizer.step()
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

    def _sync(self, last: bool) -> AbstractContextManager[None]:
        """Gradients cross the network once a step, with its last micro-batch."""
        if last or not isinstance(self.model, DistributedDataParallel):
            return nullcontext()
        return self.model.no_sync()
