"""The training loop: every rank runs it, and step s sees the same samples whatever their number.

A step is a global batch: `batch_size * data_size * accumulate` samples, dealt to the
ranks that have samples of their own by `ddp_hpc.data.batches`. Gradients and losses are
means over the samples of the step, so an uneven tail needs neither padding nor a special case.
"""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import takewhile

import numpy as np
import torch

from ddp_hpc.data.batches import Position, Share, deal, steps_left
from ddp_hpc.data.order import sample_numbers
from ddp_hpc.data.samples import Samples
from ddp_hpc.errors import RequestError
from ddp_hpc.training.clock import StepClock
from ddp_hpc.training.compiling import Compiled, warm_up
from ddp_hpc.training.config import TrainConfig
from ddp_hpc.training.evaluate import Evaluation, evaluate
from ddp_hpc.training.flops import flops_per_sample, peak_flops_per_s
from ddp_hpc.training.group import Group
from ddp_hpc.training.heartbeat import Heartbeat
from ddp_hpc.training.layers import checkpoint_activations
from ddp_hpc.training.loader import Loader
from ddp_hpc.training.precision import Precision, set_matmul_precision
from ddp_hpc.training.progress import Progress
from ddp_hpc.training.random_state import seed_generators
from ddp_hpc.training.sinks import open_sinks
from ddp_hpc.training.skew import Skew
from ddp_hpc.training.step import Pending, Stepper
from ddp_hpc.training.stopping import next_talk
from ddp_hpc.training.strategies import Strategy, make_strategy
from ddp_hpc.training.strategies.mesh import Mesh
from ddp_hpc.training.survival import Losses, Survival
from ddp_hpc.training.task import Task, zeros
from ddp_hpc.training.tracing import Trace

_OPTIMIZER_NAMES = {"adam": "Adam", "adamw": "AdamW", "sgd": "SGD"}


@dataclass(frozen=True, kw_only=True)
class Result:
    """What came of a run. `samples_per_s` leaves out the first step, which warms things up."""

    num_parameters: int
    steps: int
    """Of the run, those of earlier attempts counted in."""
    resumed_from: int
    total_steps: int
    samples: int
    """That this attempt trained on."""
    wall_s: float
    samples_per_s: float
    first_loss: float
    final_loss: float
    test: Evaluation | None
    flops_per_sample: float
    """Of forward and backward; 0: not known."""
    peak_flops_per_s: float
    """Of this rank's device; 0: not known."""
    strategy: str
    """How the ranks shared it: `ddp`, or `dp=2,tp=2`."""
    state_bytes: int
    """Of parameters, gradients and the optimizer's state on this rank."""
    peak_bytes: int
    """The most memory this rank had in use: of the device, on a CPU of the process."""
    stopped: str
    """Why it stopped before its end, its state saved; empty: it did not."""

    def share_of_peak(self, world_size: int) -> float | None:
        """What all devices computed over what they could at most; None where either is not known."""
        peak = self.peak_flops_per_s * world_size
        return self.flops_per_sample * self.samples_per_s / peak if peak and self.flops_per_sample else None


def train(
    config: TrainConfig,
    group: Group,
    task: Task,
    samples: Samples,
    progress: Progress,
    survival: Survival,
    heart: Heartbeat,
    trace: Trace,
) -> Result:
    """Trains the task's model on the samples; tells `trace` of each step.

    Collective: every rank must call this.

    Raises:
        RequestError: where a snapshot does not fit the model, or the strategy is not to be had.
    """
    device = group.device
    dtype = torch.float64 if samples.src_dtype == np.float64 else torch.float32
    task.model.to(dtype)
    num_parameters = sum(p.numel() for p in task.model.parameters())
    # Rank 0's summary tells it, and it takes a second to count.
    counts = group.world.rank == 0 and (config.summary is not None or device.type == "cuda")
    flops = flops_per_sample(task, samples, dtype) if counts else 0.0
    if said := set_matmul_precision(config.matmul_precision, device):
        progress.say(said)
    strategy = _share(task, group, config)
    mesh = strategy.mesh
    compiled = None
    if config.compile is not None:
        compiled = Compiled()
        batch = zeros(task, samples, dtype, device, min(config.batch_size, samples.num_samples))
        progress.say(f"compiled: {warm_up(strategy, *batch)}")
    # Ranks draw different dropout masks from here on, but those that share samples the same; the
    # parameters above are the same on all.
    seed_generators(config.rank_seed(mesh.data_rank))
    peak_lr = config.scaled_lr(mesh.data_size)
    progress.say(
        f"model: {config.model}, {num_parameters:,} parameters; {_OPTIMIZER_NAMES[config.optimizer]}, lr "
        f"{peak_lr:g} ({config.lr:g}, {config.lr_scaling} scaling over {mesh.data_size})"
    )
    if (name := _strategy_name(config, mesh)) not in ("single", "ddp"):
        progress.say(f"strategy: {name}")
    snapshot = survival.open()
    if group.comm.bcast(snapshot is not None):
        strategy.settle(*zeros(task, samples, dtype, device, 2))
    position, losses, lr_ranks = survival.resume(snapshot, strategy.state(), samples, mesh)
    del snapshot
    resumed = position
    left = steps_left(
        samples.num_samples, config.batch_size, mesh.data_size, config.accumulate, config.epochs, position
    )
    total = min(position.step + left, config.max_steps or sys.maxsize)
    if position.step >= total:
        progress.say(
            f"note: all {position.step} steps of this run are trained already; for another run name another "
            "--snapshot-dir (job scripts: --name or --run-dir), or raise --epochs to train on"
        )
    sinks = open_sinks(config, group, position.step)
    skew = Skew(config.skew_limit, group.comm.allgather(group.world.hostname))
    clock, pending = StepClock(device), Pending()
    loader = Loader(samples, device, workers=config.workers, timeout_s=config.timeout_s)

    def steps() -> Iterator[tuple[Position, tuple[Share, ...]]]:
        dealt = deal(
            samples.num_samples, config.batch_size, mesh.data_size, mesh.data_rank, config.accumulate, resumed
        )
        return takewhile(lambda step: step[0].step < total, dealt)

    batches = loader.batches(sample_numbers(steps(), samples.num_samples, config.seed, config.shuffle))
    stepper = Stepper(config, group, batches, strategy, dtype, clock, heart, lr_ranks, total)

    def test_after(epoch: int) -> Evaluation | None:
        if samples.test is None:
            return None
        begin_s = time.monotonic()
        found = evaluate(
            strategy,
            samples.test,
            batch_size=config.batch_size,
            dtype=dtype,
            timeout_s=config.timeout_s,
            tick=partial(heart.at, position.step, "evaluation"),
        )
        survival.evaluated(time.monotonic() - begin_s)
        progress.say(f"epoch {epoch}/{config.epochs} test: {found}")
        return found

    talk_at, warned, stop = 0, False, ""
    test: Evaluation | None = None
    start_s = time.perf_counter()
    for _, shares in steps():
        epoch = position.epoch
        stepper.one_step(position, shares, pending)
        trace.step()
        position = position.after(shares[0], samples.num_samples)
        last = position.step == total
        is_first = position.step == resumed.step + 1
        logs = position.step % config.log_every == 0 or last or is_first
        decision = None
        if logs or position.step >= talk_at or survival.saves_at(position.step):
            heart.at(position.step, "settle")
            records, signs = pending.settle(group, clock, lambda s: [*survival.signs(s), clock.own_s])
            decision = survival.decide(signs, position, last)
            for sink in sinks:
                sink.write(records)
            losses = Losses(records[0].loss if position.step == 1 else losses.first, records[-1].loss)
            slowest_s = max(one[2] for one in signs)
            if told := skew.look([one[3] for one in signs], slowest_s):
                progress.say(told)
            talk_at = next_talk(position.step, slowest_s)
            if not warned and (bad := next((r for r in records if not math.isfinite(r.loss)), None)):
                warned = True
                progress.say(
                    f"warning: the loss is {bad.loss} at step {bad.step}: look at the data and the lr; "
                    "--check-gradients finds the layer and the rank"
                )
        if logs:
            progress.step(position.step, total, f"{epoch + 1}/{config.epochs}", losses.last, pending.rate())
        if decision is not None and decision.save:
            heart.at(position.step, "snapshot")
            tick = partial(heart.at, position.step, "snapshot")
            survival.save(position, losses, strategy.state(), samples, tick)
            stop = decision.stop
        if stop:
            break
        if position.epoch > epoch and not last:
            test = test_after(epoch + 1)
    if not stop:  # also where an attempt before this one was ended in the middle of it
        test = test_after(position.epoch + (position.begin > 0))
    wall_s = time.perf_counter() - start_s
    if str(compiled or ""):
        progress.say(f"note: {compiled}")
    batches.close()
    for sink in sinks:
        sink.close()
    heart.at(position.step, "snapshot")
    survival.finish(position, stop, partial(heart.at, position.step, "snapshot"))
    return Result(
        num_parameters=num_parameters,
        steps=position.step,
        resumed_from=resumed.step,
        total_steps=total,
        samples=position.samples - resumed.samples,
        wall_s=wall_s,
        samples_per_s=clock.samples_per_s(),
        first_loss=losses.first,
        final_loss=losses.last,
        test=test,
        flops_per_sample=flops,
        peak_flops_per_s=peak_flops_per_s(device, config.amp, config.matmul_precision),
        strategy=_strategy_name(config, mesh),
        state_bytes=strategy.state_bytes(),
        peak_bytes=_peak_bytes(device),
        stopped=stop,
    )


def _share(task: Task, group: Group, config: TrainConfig) -> Strategy:
    """The strategy with the task's model. Collective: every rank must call this."""
    problem, strategy = "", None
    try:
        if config.activation_checkpointing:
            checkpoint_activations(task.model)
        strategy = make_strategy(task, group, config, Precision(config.amp, group.device))
    except RequestError as error:
        problem = str(error)
    group.agree(problem, RequestError.exit_code)
    assert strategy is not None
    return strategy


def _strategy_name(config: TrainConfig, mesh: Mesh) -> str:
    if mesh.is_single:
        return "dataparallel" if config.strategy == "dataparallel" else "single"
    return str(mesh) if config.mesh is not None else config.strategy


def _peak_bytes(device: torch.device) -> int:
    if device.type == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return int(torch.get_device_module(device).max_memory_allocated(device))
