"""The training loop, which every rank runs. A step uses the same samples for any number of ranks.

A step is a global batch: by default `batch_size * data_size * accumulate` samples, which
`ddp_hpc.data.step_shards` divides among the data-parallel ranks. Gradients and losses are means over
the samples of the step, so a smaller last step needs neither padding nor a special case.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import takewhile

import numpy as np
import torch

from ddp_hpc.base.run_outcomes import Stop
from ddp_hpc.data.sample_order import EpochOrder, sample_numbers
from ddp_hpc.data.samples import Samples
from ddp_hpc.data.step_shards import Position, Share, rank_shares, steps_left
from ddp_hpc.training.config import TrainConfig
from ddp_hpc.training.evaluation import Evaluation, evaluate
from ddp_hpc.training.health.heartbeat import Heartbeat
from ddp_hpc.training.health.slow_rank import SlowRankDetector
from ddp_hpc.training.input.batch_loader import Loader
from ddp_hpc.training.optimization.precision import set_matmul_precision
from ddp_hpc.training.optimization.step_graph import use_one_stream
from ddp_hpc.training.parallel.device_mesh import Mesh
from ddp_hpc.training.parallel.make_strategy import Strategy, make_strategy
from ddp_hpc.training.parallel.model_layers import checkpoint_activations
from ddp_hpc.training.parallel.warm_up import warm_up
from ddp_hpc.training.process_group.group import Group
from ddp_hpc.training.run.lifecycle import RunLifecycle
from ddp_hpc.training.run.resumable import Losses
from ddp_hpc.training.run.save_schedule import CONTINUE, Decision
from ddp_hpc.training.run.stop_protocol import ExchangeSchedule
from ddp_hpc.training.snapshots.random_state import seed_generators
from ddp_hpc.training.step import Pending, Stepper
from ddp_hpc.training.tasks.flops import flops_per_sample, peak_flops_per_s
from ddp_hpc.training.tasks.task import Task, zeros
from ddp_hpc.training.telemetry.metric_sinks import open_sinks
from ddp_hpc.training.telemetry.profiler import Trace
from ddp_hpc.training.telemetry.progress import Progress
from ddp_hpc.training.telemetry.step_clock import StepClock

_AGAINST_NON_FINITE = (
    "check the data, lower --lr or use --clip-norm; --check-gradients names the layer, and "
    "--allow-non-finite-loss continues the training"
)
# The maximum number of sample numbers that an error message lists.
_MOST_SAMPLES = 16
_OPTIMIZER_NAMES = {"adam": "Adam", "adamw": "AdamW", "sgd": "SGD"}


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of a run. `samples_per_s` excludes the first step, which includes one-time work."""

    num_parameters: int
    steps: int
    """Completed steps of the run, including earlier attempts."""
    resumed_from: int
    total_steps: int
    samples: int
    """Samples that this attempt trained on."""
    wall_s: float
    samples_per_s: float
    first_loss: float
    final_loss: float
    test: Evaluation | None
    flops_per_sample: float
    """Floating-point operations of a forward and backward pass per sample; 0 if unknown."""
    peak_flops_per_s: float
    """Peak FLOP/s of this rank's device; 0 if unknown."""
    strategy: str
    """The strategy or the mesh of the training, such as `ddp` or `dp=2,tp=2`."""
    state_bytes: int
    """Bytes of the parameters, gradients and optimizer state on this rank."""
    peak_bytes: int
    """Peak memory of this rank: device memory, or that of the process on a CPU."""
    stopped: Stop | None
    """Why the run stopped early with its state saved; None if it did not stop early."""

    def share_of_peak(self, world_size: int) -> float | None:
        """The achieved fraction of the peak FLOP/s of all devices; None if either rate is unknown."""
        peak = self.peak_flops_per_s * world_size
        return self.flops_per_sample * self.samples_per_s / peak if peak and self.flops_per_sample else None


@dataclass(eq=False)
class Trainer:
    """Trains the task's model on the samples. Collective: every rank must create it and call `run`.

    Raises:
        RequestError: on construction, if a snapshot does not fit the model, or the strategy is not available.
    """

    config: TrainConfig
    group: Group
    task: Task
    samples: Samples
    progress: Progress
    lifecycle: RunLifecycle
    heartbeat: Heartbeat
    trace: Trace
    """Counts the steps for the profiler."""

    def __post_init__(self) -> None:
        config, group, samples = self.config, self.group, self.samples
        self.dtype = torch.float64 if samples.src.dtype == np.float64 else torch.float32
        self._set_up_model()
        self._resume()
        self.sinks = open_sinks(config.telemetry, group, self.position.step)
        self.slow_ranks = SlowRankDetector(
            config.health.skew_limit, group.comm.gather("the host names", group.world.hostname)
        )
        # On a CPU, the loss of a step is known when the step ends.
        self.clock, self.pending = StepClock(group.device), Pending(delay=int(group.device.type != "cpu"))
        data = config.data
        loader = Loader(samples, group.device, workers=data.workers, timeout_s=config.process_group.timeout_s)
        self.order_of = partial(EpochOrder, samples.num_samples, config.seed, shuffle=data.shuffle)
        numbers = sample_numbers(self._steps(), self.order_of)
        self.batches = loader.batches(numbers)
        self.stepper = Stepper(
            config.optimization, group, self.batches, self.strategy, self.dtype, self.clock,
            self.heartbeat, self.lr_ranks, self.total,
        )  # fmt: skip
        self.exchanges = ExchangeSchedule(0)
        self.warned = self.logs = False
        self.test: Evaluation | None = None
        self.lifecycle.begin()

    def run(self) -> Result:
        """Runs all remaining steps. Collective: every rank must call this."""
        start_s = time.perf_counter()
        stop: Stop | None = None
        for _, shares in self._steps():
            epoch = self.position.epoch
            self._step(shares)
            is_last = self.position.step == self.total
            stop = self._exchange_and_save(is_last)
            if stop is not None:
                break
            if self.position.epoch > epoch and not is_last:
                self.test = self._evaluate(epoch + 1)
        if stop is None:  # if an earlier attempt ended during an evaluation, this repeats the evaluation
            self.test = self._evaluate(self.position.epoch + (self.position.begin > 0))
        return self._finish(time.perf_counter() - start_s, stop)

    def _set_up_model(self) -> None:
        """Moves the model to the device, distributes it over the ranks, and compiles it if requested."""
        config, group, task, device = self.config, self.group, self.task, self.group.device
        if config.optimization.cuda_graph and device.type == "cuda":
            use_one_stream(device)
        task.model.to(self.dtype)
        self.num_parameters = sum(p.numel() for p in task.model.parameters())
        # Only rank 0 counts FLOPs, because only its summary needs them, and counting takes a second.
        counts = group.world.rank == 0 and (config.telemetry.summary is not None or device.type == "cuda")
        self.flops = flops_per_sample(task, self.samples, self.dtype) if counts else 0.0
        if line := set_matmul_precision(config.optimization.matmul_precision, device):
            self.progress.say(line)
        self.strategy = _distribute(task, group, config)
        if config.optimization.compile is not None:
            self.progress.say(f"compiled: {warm_up(self.strategy, *self._trial_batch())}")
        mesh = self.strategy.mesh
        # From here on, data-parallel ranks draw different dropout masks; ranks that share samples draw the
        # same ones. The parameters were initialized equally on all ranks.
        seed_generators(config.rank_seed(mesh.data_rank))
        self.progress.say(_described(config, self.num_parameters, mesh))
        if (name := _strategy_name(config, mesh)) not in ("single", "ddp"):
            self.progress.say(f"strategy: {name}")

    def _trial_batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns a batch of zeros. Compiled models get a full batch, because other sizes are recompiled."""
        is_compiled = self.config.optimization.compile is not None
        size = min(self.config.data.batch_size, self.samples.num_samples) if is_compiled else 2
        return zeros(self.task, self.samples, self.dtype, self.group.device, size)

    def _resume(self) -> None:
        """Restores the newest snapshot, if any, and computes the number of steps."""
        config, mesh, samples = self.config, self.strategy.mesh, self.samples
        with self.group.failing_together():
            self.global_batch = config.global_batch(mesh.data_size)
        snapshot = self.lifecycle.open()
        if self.group.comm.bcast(snapshot is not None):
            self.strategy.prepare_restore(*self._trial_batch())
        state = self.strategy.state()
        self.position, self.losses, self.lr_ranks = self.lifecycle.resume(
            snapshot, state, samples.num_samples, mesh
        )
        self.resumed = self.position
        left = steps_left(samples.num_samples, self.global_batch, config.epochs, self.position)
        self.total = min(self.position.step + left, config.max_steps or sys.maxsize)
        if self.position.step >= self.total:
            self.progress.say(
                f"note: all {self.position.step} steps of this run are already done; raise --epochs to "
                "continue it, or use another --snapshot-dir for a new run (job scripts: --name or --run-dir)"
            )

    def _steps(self) -> Iterator[tuple[Position, tuple[Share, ...]]]:
        """Yields the remaining steps with this rank's shares of their samples."""
        config, mesh = self.config, self.strategy.mesh
        shares = rank_shares(
            self.samples.num_samples, config.data.batch_size, mesh.data_size, mesh.data_rank,
            self.global_batch, self.resumed,
        )  # fmt: skip
        return takewhile(lambda step: step[0].step < self.total, shares)

    def _step(self, shares: tuple[Share, ...]) -> None:
        """Runs one optimizer step. An error gets notes that name the step and its samples."""
        try:
            self.stepper.one_step(self.position, shares, self.pending)
        except Exception as error:
            numbers = list(sample_numbers([(self.position, shares)], self.order_of))
            error.add_note(f"step {self.position.step + 1}")
            error.add_note(f"samples {_listed(numbers[self.stepper.micro_batch].tolist())}")
            raise
        self.trace.step()
        self.position = self.position.after(shares[0], self.samples.num_samples)

    def _exchange_and_save(self, is_last: bool) -> Stop | None:
        """Exchanges results if due, logs and saves; returns why the run stops now, or None."""
        step, every = self.position.step, self.config.telemetry.log_every
        saves = self.lifecycle.saves_at(step)
        known = step - self.pending.delay  # the loss of this step can be sent without waiting for the device
        logs = is_last or known == self.resumed.step + 1 or (every is not None and known % every == 0)
        decision = self._receive(is_last) if self.pending.is_sent else CONTINUE
        # A snapshot waits for the device anyway, and the metrics of all its steps must be written before.
        waits = is_last or saves or decision.save or not self.pending.delay
        if logs or self.exchanges.is_due(step) or saves or decision.save:
            self.logs = self.logs or logs or every is None
            self._send(whole=waits)
            if waits and self.pending.is_sent:
                decision = decision.combined_with(self._receive(is_last))
        if not (decision.save or is_last):
            return None
        tick = partial(self.heartbeat.at, step, "snapshot")
        tick()
        self.strategy.equalize()
        state = self.strategy.state()
        self.lifecycle.check_parameters(step, state, tick)
        if decision.save:
            self.lifecycle.save(self.position, self.losses, state, tick)
        return decision.stop

    def _send(self, whole: bool) -> None:
        """Starts the exchange of the losses of the pending steps and of the ranks' reports. Collective."""
        self.heartbeat.at(self.position.step, "exchange")
        self.pending.send(
            self.group,
            self.clock,
            lambda step_s: self.lifecycle.report(step_s, self.clock.own_s),
            whole=whole,
        )

    def _receive(self, is_last: bool) -> Decision:
        """Completes the exchange, and writes the metrics. Waits for the exchange."""
        step, tick = self.position.step, partial(self.heartbeat.at, self.position.step, "exchange")
        tick()
        exchanged = self.pending.receive()
        decision = self.lifecycle.decide(exchanged.reports, self.position, is_last)
        self.lifecycle.waited_for_data(sum(record.data_s for record in exchanged.records))
        for sink in self.sinks:
            sink.write(exchanged.records)
        first, last = exchanged.records[0], exchanged.records[-1]
        self.losses = Losses(first.loss if first.step == 1 else self.losses.first, last.loss)
        slowest_s = exchanged.reports.slowest_step_s()
        # Only rank 0 prints the line, and only rank 0 knows the host names.
        if self.group.world.rank == 0 and (
            line := self.slow_ranks.check(exchanged.reports.own_s(), slowest_s)
        ):
            self.progress.say(line)
        self.exchanges.exchanged(step, slowest_s)
        if exchanged.non_finite is not None:
            if not self.config.optimization.allow_non_finite_loss:
                self.lifecycle.stop_failed(f"{exchanged.non_finite}: {_AGAINST_NON_FINITE}", tick)
            if not self.warned:
                self.warned = True
                self.progress.say(f"warning: {exchanged.non_finite}: --check-gradients finds the layer")
        if self.logs:
            self.logs = False
            epochs = f"{last.epoch}/{self.config.epochs}"
            self.progress.step(last.step, self.total, epochs, last.loss, self.pending.rate())
        return decision

    def _evaluate(self, epoch: int) -> Evaluation | None:
        """Evaluates the test split, if there is one."""
        if self.samples.test is None:
            return None
        begin_s = time.monotonic()
        try:
            self.strategy.equalize()
            result = evaluate(
                self.strategy,
                self.samples.test,
                batch_size=self.config.data.batch_size,
                dtype=self.dtype,
                timeout_s=self.config.process_group.timeout_s,
                tick=partial(self.heartbeat.at, self.position.step, "evaluation"),
            )
        except Exception as error:
            error.add_note(f"the evaluation after step {self.position.step}")
            raise
        self.lifecycle.evaluated(time.monotonic() - begin_s)
        self.progress.say(f"epoch {epoch}/{self.config.epochs} test: {result}")
        return result

    def _finish(self, wall_s: float, stop: Stop | None) -> Result:
        """Closes the outputs, completes the last snapshot, and returns the result."""
        config, position, device = self.config, self.position, self.group.device
        self.batches.close()
        self.stepper.close()
        for sink in self.sinks:
            sink.close()
        self.heartbeat.at(position.step, "snapshot")
        self.lifecycle.finish(position, stop, partial(self.heartbeat.at, position.step, "snapshot"))
        return Result(
            num_parameters=self.num_parameters,
            steps=position.step,
            resumed_from=self.resumed.step,
            total_steps=self.total,
            samples=position.samples - self.resumed.samples,
            wall_s=wall_s,
            samples_per_s=self.clock.samples_per_s(),
            first_loss=self.losses.first,
            final_loss=self.losses.last,
            test=self.test,
            flops_per_sample=self.flops,
            peak_flops_per_s=peak_flops_per_s(
                device, config.optimization.half_dtype, config.optimization.matmul_precision
            ),
            strategy=_strategy_name(config, self.strategy.mesh),
            state_bytes=self.strategy.state_bytes(),
            peak_bytes=_peak_bytes(device),
            stopped=stop,
        )


def _distribute(task: Task, group: Group, config: TrainConfig) -> Strategy:
    """Distributes the task's model with the requested strategy. Collective: every rank must call this."""
    with group.failing_together():
        if config.parallel.activation_checkpointing:
            checkpoint_activations(task.model)
        return make_strategy(task, group, config.parallel, config.optimization)


def _described(config: TrainConfig, num_parameters: int, mesh: Mesh) -> str:
    """Returns the line about the model and the optimizer for the log."""
    optimization = config.optimization
    return (
        f"model: {config.model.name}, {num_parameters:,} parameters; "
        f"{_OPTIMIZER_NAMES[optimization.optimizer]}, lr {optimization.scaled_lr(mesh.data_size):g} "
        f"(--lr {optimization.lr:g}, --lr-scaling {optimization.lr_scaling}, "
        f"data-parallel ranks: {mesh.data_size})"
    )


def _listed(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:_MOST_SAMPLES]))
    num_hidden = len(numbers) - _MOST_SAMPLES
    return f"{shown} and {num_hidden} more" if num_hidden > 0 else shown


def _strategy_name(config: TrainConfig, mesh: Mesh) -> str:
    if mesh.is_single:
        return "dataparallel" if config.parallel.strategy == "dataparallel" else "single"
    return str(mesh) if config.parallel.mesh is not None else config.parallel.strategy


def _peak_bytes(device: torch.device) -> int:
    if device.type == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return int(torch.get_device_module(device).max_memory_allocated(device))
