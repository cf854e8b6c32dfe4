"""Manages a run that spans several jobs: resumes, saves and stops it, and writes its state.

All ranks take part; rank 0 reads and writes the files and checks the time limit. Without a snapshot
directory there is nothing to resume from, and signals end the run as they end any program.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

from ddp_hpc.atomic_files import write_atomically
from ddp_hpc.data.step_shards import Position
from ddp_hpc.errors import EXIT_FAILED, DataError, DdpHpcError, RequestError
from ddp_hpc.options import as_toml, to_options
from ddp_hpc.run_state import RunState, read_state, write_refused, write_state
from ddp_hpc.schedulers.deadline import Deadline, current_end_s, find_deadline, kill_delay_s
from ddp_hpc.training.config import TrainConfig
from ddp_hpc.training.health.preemption import StopRequests
from ddp_hpc.training.health.rank_report import RankReport, RankReports
from ddp_hpc.training.health.shutdown import Parts
from ddp_hpc.training.parallel.device_mesh import Mesh
from ddp_hpc.training.process_group.group import Group
from ddp_hpc.training.snapshots.host_buffer import num_bytes_of
from ddp_hpc.training.snapshots.joint_save import JointSave
from ddp_hpc.training.snapshots.random_state import seed_generators
from ddp_hpc.training.snapshots.snapshot_directory import SnapshotDirectory, SnapshotWriter
from ddp_hpc.training.snapshots.snapshot_files import Snapshot, read_snapshot, specs_of_saved
from ddp_hpc.training.snapshots.training_state import TrainingState
from ddp_hpc.training.snapshots.verified_file import DamagedSnapshotError
from ddp_hpc.training.telemetry.metrics_file import versions
from ddp_hpc.training.telemetry.progress_bar import Progress

# Write speed of a busy parallel file system, assumed until the first save has been measured.
_SLOW_DISK_BYTES_PER_S = 200e6
_HUNG_DISK_S = 2.0
# Options that affect the losses but can change between attempts; the log reports changes. (A change of an
# option that affects the order of samples is rejected instead.)
_LOSS_OPTIONS = (
    "data", "src_key", "tgt_key", "dropout", "lr", "lr_scaling", "warmup_steps", "clip_norm",
    "model_options", "lr_schedule", "optimizer", "weight_decay", "amp", "fp8", "matmul_precision",
    "compress_gradients", "param_dtype", "moment_dtype",
)  # fmt: skip


# The number of samples in the description of a snapshot if the run does not count samples.
_NOT_COUNTED = 1
# The parts of the description that only this rank's files need, and that can be large.
_INDEX = ("files", "tensors")


@dataclass(frozen=True)
class RunDirectories:
    """The directories from which a run resumes."""

    run: Path
    """The run directory, with the file `state`."""
    snapshots: Path


def find_run_directories(config: TrainConfig, environ: dict[str, str]) -> RunDirectories | None:
    """Returns the run directory and the snapshot directory; None if snapshots are not enabled.

    The snapshot directory is `--snapshot-dir`, or else `snapshots` in `DDP_HPC_RUN_DIR`. Snapshots are not
    enabled if neither is set, or with --no-snapshots.
    """
    run = environ.get("DDP_HPC_RUN_DIR", "")
    if not config.snapshots.enabled or (config.snapshots.directory is None and not run):
        return None
    snapshots = config.snapshots.directory or Path(run) / "snapshots"
    return RunDirectories(Path(run) if run else snapshots, snapshots)


@dataclass(frozen=True)
class Losses:
    """The run's first and last loss, over all its attempts."""

    first: float = float("nan")
    last: float = float("nan")


@dataclass(frozen=True)
class Decision:
    """The decision that all ranks make after a step."""

    save: bool
    stop: str
    """The reason why the run stops after this step; empty if it continues."""

    def combined_with(self, later: Decision) -> Decision:
        """Returns what both decisions request."""
        return Decision(save=self.save or later.save, stop=self.stop or later.stop)


class RunLifecycle:
    """Resumes, saves and stops the run on this rank. Created by `manage_run`."""

    def __init__(
        self,
        config: TrainConfig,
        group: Group,
        progress: Progress,
        directories: RunDirectories | None,
        stop_requests: StopRequests | None,
    ) -> None:
        self._config = config
        self._group = group
        self._progress = progress
        self._directories = directories
        self._stop_requests = stop_requests
        self._directory: SnapshotDirectory | None = None  # only on rank 0, if snapshots are enabled
        self._writer: SnapshotWriter | None = None  # on each rank that writes: all, if the state is sharded
        self._last_save_s = time.monotonic()
        self._num_exchanges = 0
        self._opened = False
        self._begun = False
        self._over = False  # the run was ended by an error
        self._writing_state = threading.Lock()  # prevents the saving thread from overwriting `failed`
        self._start_step: int | None = None  # set by `resume`
        self._lr_ranks = self._data_size = 1  # set by `resume`
        self._layout = ""

    @property
    def stacks(self) -> Path | None:
        """The directory for the stack traces of hanging ranks."""
        return None if self._directories is None else self._directories.run / "stacks"

    @property
    def tracebacks(self) -> Path | None:
        """The directory for the tracebacks of failed ranks."""
        return None if self._directories is None else self._directories.run / "tracebacks"

    def open(self) -> Snapshot | None:
        """Locks the snapshot directory and returns its newest valid snapshot, or None if there is none.

        A snapshot of whole tensors is returned only on rank 0, and a sharded one on all ranks. Collective:
        every rank must call this.

        Raises:
            DataError: another job uses the directory, or none of its snapshots is valid.
        """
        if self._directories is None:
            return None
        snapshot, keep = None, self._config.snapshots.keep
        with self._group.failing_together():
            if self._group.world.rank == 0:
                self._writer = self._directory = SnapshotDirectory(
                    self._directories.snapshots, keep, self._progress.say, self._on_saved
                )
                snapshot = self._directory.newest_valid()
        self._opened = True
        return self._on_all_ranks(snapshot)

    def _on_all_ranks(self, snapshot: Snapshot | None) -> Snapshot | None:
        """Returns rank 0's snapshot on all ranks if it is sharded. Collective: every rank must call this."""
        path = self._group.comm.bcast(str(snapshot.path) if snapshot and snapshot.is_sharded else "")
        with self._group.failing_together():
            if path and snapshot is None:
                try:
                    return read_snapshot(Path(path), checks_sizes=False)
                except DamagedSnapshotError as error:
                    raise DataError(
                        f"{error}. Rank 0 could read it: check the file system of this node"
                    ) from error
        return snapshot

    def resume(
        self, snapshot: Snapshot | None, state: TrainingState, num_samples: int | None, mesh: Mesh
    ) -> tuple[Position, Losses, int]:
        """Restores the snapshot; returns the position, the losses, and the number of ranks for --lr-scaling.

        If the global batch is the same as in the snapshot, that number is taken from the snapshot, so that
        the losses do not depend on the current number of ranks. `num_samples` is None if the run does not
        count samples. `mesh` defines how the samples of a step are distributed.

        Collective: every rank must call this.

        Raises:
            DataError: the snapshot is from a different model, different data or a different order.
        """
        data_size = self._data_size = mesh.data_size
        self._layout = mesh.layout
        about, exact = self._restore(snapshot, state, num_samples)
        if about is None:
            position, losses, self._lr_ranks = Position(), Losses(), data_size
        else:
            position, losses = Position(**about["position"]), Losses(**about["losses"])
            same_batch = about["global_batch"] == self._global_batch()
            self._lr_ranks = about["lr_ranks"] if same_batch else data_size
            # With another layout, ranks that share samples would get different dropout masks.
            exact = exact and about["layout"] == self._layout
            if not exact:
                # This seed is deterministic, and differs from the seeds of earlier attempts.
                seed = self._config.rank_seed(mesh.data_rank) * 1_000_003 + position.step
                seed_generators(seed % 2**63)
            self._report_resumed(about, position, exact, num_samples is not None)
        self._prepare_saves(state)
        if self._stop_requests is not None:
            # Adam stores two more values per parameter.
            num_bytes = 3 * num_bytes_of(state.whole)
            num_bytes //= self._group.world.world_size if state.is_sharded else 1
            self._stop_requests.expect_save(num_bytes / _SLOW_DISK_BYTES_PER_S)
        self._start_step = position.step
        self._last_save_s = time.monotonic()
        return position, losses, self._lr_ranks

    def begin(self) -> None:
        """Records in the run directory that the run is running. Call it when no more errors of the user are
        possible: a start that is refused must not change the state of the run.
        """
        assert self._start_step is not None  # `resume` was called
        self._begun = True
        if self._directories is not None and self._group.world.rank == 0:
            keep_config(self._directories.run, self._config)
        self._write_state("running", self._start_step, f"since {time.strftime('%Y-%m-%d %H:%M:%S')}")
        self._last_save_s = time.monotonic()

    def refused(self) -> None:
        """Tells the supervisor of the job that this attempt was refused before it began."""
        if self._directories is not None and self._group.world.rank == 0 and not self._begun:
            with suppress(DdpHpcError):  # report the first error
                write_refused(self._directories.run, os.environ)

    def _restore(
        self, snapshot: Snapshot | None, state: TrainingState, num_samples: int | None
    ) -> tuple[dict[str, Any] | None, bool]:
        """Restores the newest snapshot that is not damaged. Returns its description, and whether the random
        number generators were restored, too. Collective: every rank must call this.
        """
        group = self._group
        while True:
            with group.failing_together():
                if snapshot is not None and group.world.rank == 0:
                    self._check(snapshot, state, num_samples)
            about: dict[str, Any] | None = group.comm.bcast(
                None if snapshot is None else {k: v for k, v in snapshot.about.items() if k not in _INDEX}
            )
            if about is None:
                return None, False
            try:
                return about, state.restore(snapshot)
            except DamagedSnapshotError as error:
                older = None
                with group.failing_together():
                    if self._directory is not None:
                        self._directory.skip(error)
                        older = self._directory.newest_valid(before=Position(**about["position"]).step)
                snapshot = self._on_all_ranks(older)

    def _prepare_saves(self, state: TrainingState) -> None:
        """Creates a writer on all ranks if each writes its shards. Collective: every rank must call this."""
        if self._directories is None or not state.is_sharded:
            return
        group = self._group
        token = group.comm.bcast(f"{os.getpid()}-{secrets.token_hex(4)}")
        assert group.store is not None  # sharded tensors need a process group
        limit_s = self._config.process_group.timeout_s
        joint = JointSave(group.store, group.world.rank, group.world.world_size, limit_s, token)
        if self._writer is None:
            self._writer = SnapshotWriter(self._directories.snapshots, self._progress.say)
        self._writer.joint = joint

    def report(self, step_s: float, own_s: float) -> RankReport:
        """Returns this rank's report to the others.

        Raises:
            DdpHpcError: another job has taken over the directory.
        """
        if self._stop_requests is None:
            return RankReport(0.0, 0.0, step_s, own_s)
        if self._directory is not None and self._directory.lost:
            raise DdpHpcError(
                f"another job has taken over {self._directory.path}, because this job did not respond for "
                "too long or its file .lock was removed. This job stops, and the other job continues the run"
            )
        self._num_exchanges += 1
        if self._num_exchanges > 1:  # not the first step, which allocates, connects and compiles
            self._stop_requests.measured(step_s=step_s)
        due = (
            self._directory is not None
            and time.monotonic() - self._last_save_s > self._config.snapshots.every_s
        )
        stop_request = float(self._stop_requests.stop_request())
        return RankReport(stop_request, float(due), step_s, own_s, self._stop_requests.deadline_s)

    def evaluated(self, evaluation_s: float) -> None:
        """Records the duration of an evaluation, during which the run cannot stop."""
        if self._stop_requests is not None:
            self._stop_requests.measured(step_s=evaluation_s)

    def saves_at(self, step: int) -> bool:
        """Returns whether a snapshot is due after this step according to `--snapshot-every-steps`."""
        every = self._config.snapshots.every_steps
        return self._directories is not None and every is not None and step % every == 0

    def decide(self, reports: RankReports, position: Position, last: bool) -> Decision:
        """Returns the decision of all ranks after this step. The decision depends only on the reports of all
        ranks, so it is the same on every rank.
        """
        if self._stop_requests is None:
            return Decision(save=False, stop="")
        if self._stop_requests.move_deadline(deadline_s := reports.deadline_s()):
            at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(deadline_s))
            self._progress.say(f"note: the walltime of the job was changed; the job now ends at {at}")
        stop_request, rank = reports.first_stop_request()
        due = reports.save_due() or self.saves_at(position.step)
        stop = self._stop_requests.explain(stop_request, rank) if stop_request and not last else ""
        return Decision(save=due or last or bool(stop), stop=stop)

    def stop_failed(self, problem: str, tick: Callable[[], None]) -> NoReturn:
        """Ends the run on all ranks as soon as the snapshot that is being written is complete. Collective.

        Raises:
            DdpHpcError: always. The message consists of `problem`, which is the same on all ranks, and the
                step of the newest snapshot.
        """
        kept = ""
        if self._directory is not None:
            step = self._directory.wait(tick).step
            kept = f". The snapshot of step {step} is kept" if step else ". There is no earlier snapshot"
        self._group.agree(problem + self._group.comm.bcast(kept), EXIT_FAILED)
        raise AssertionError("unreachable")

    def check_parameters(self, step: int, state: TrainingState, tick: Callable[[], None]) -> None:
        """Raises DdpHpcError on all ranks if a parameter is not finite. Collective.

        Called before each save, so that the newest snapshot can always be resumed.
        """
        if found := state.non_finite():
            name, rank = found
            self.stop_failed(
                f"step {step}: the parameter {name} is not finite on rank {rank}; training cannot continue. "
                "Check the data, lower the learning rate, or clip the gradient norm",
                tick,
            )

    def save(
        self,
        position: Position,
        losses: Losses,
        state: TrainingState,
        num_samples: int | None,
        tick: Callable[[], None],
    ) -> None:
        """Copies the state, which a thread then writes. Collective: every rank must call this.

        `tick` is called every few seconds while the previous save is still being written.
        """
        model, training = state.model_tensors(), state.training_tensors()
        self._last_save_s = time.monotonic()
        if self._writer is not None:
            about = {
                "position": asdict(position),
                "losses": asdict(losses),
                "model": self._config.model.name,
                "world_size": self._group.world.world_size,
                "layout": self._layout,
                "optimizer": state.optimizer_names,
                "global_batch": self._global_batch(),
                "lr_ranks": self._lr_ranks,
                "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                "config": _as_json(self._config),
                "versions": versions(),
                **self._order(num_samples),
            }
            self._writer.save(position.step, about, model, training, tick)
        else:  # tensors that are sharded over some of the ranks are gathered on rank 0
            for _ in chain(model.tensors, training.tensors):
                pass

    def finish(self, position: Position, stop: str, tick: Callable[[], None]) -> None:
        """Waits for the last save and writes the final state to the run directory. Collective.

        `tick` is called every few seconds meanwhile.

        Raises:
            DdpHpcError: the last state could not be saved.
        """
        if self._directories is None:
            self._write_done_without_snapshots()
            return
        problem = ""
        saved = self._writer.wait(tick) if self._writer is not None else None
        if self._directory is not None and saved is not None:
            if saved.step != position.step:
                problem = (
                    f"could not save step {position.step} in {self._directories.snapshots}; "
                    f"the newest snapshot is from step {saved.step}. Free disk space, then run the "
                    "same command again"
                )
            else:
                self._write_state("requeue" if stop else "done", position.step, stop or "training complete")
        self._group.agree(problem, EXIT_FAILED)

    def _write_done_without_snapshots(self) -> None:
        """Tells the supervisor of the job that the training is complete, also if the run is not resumed.

        Otherwise, it could not distinguish this end from that of ranks that were lost without a message.
        """
        run = os.environ.get("DDP_HPC_RUN_DIR", "")
        if run and "DDP_HPC_THIS_ATTEMPT" in os.environ and self._group.world.rank == 0:
            try:
                write_state(Path(run), RunState("done", 0, "training complete, without snapshots"))
            except DdpHpcError as error:
                self._progress.say(f"WARNING: {error}. The job will not know that the training is complete")

    def failed(self, reason: str, *, again: bool) -> None:
        """Records in the run directory that the run has failed; any rank may call this.

        `again` means that a lost node or rank was the cause. The run is then resumed if this attempt has
        saved a snapshot.
        """
        self._over = True
        if self._directories is None or not self._opened:
            return
        if self._directory is not None and self._directory.lost:
            return  # the file `state` now belongs to another job
        # If the disk hangs, the saving thread keeps the lock: write without it, so that this process ends.
        locked = self._writing_state.acquire(timeout=_HUNG_DISK_S)
        with suppress(DdpHpcError):  # report the first error
            self._write_failed(self._directories.run, reason, again)
        if locked:
            self._writing_state.release()

    def finish_writing(self, limit_s: float, has_lost_rank: Callable[[], bool]) -> None:
        """Waits for the snapshot that is being written, although the run ends with an error.

        If a rank was lost before it has written its part, the snapshot is discarded.
        """
        if self._writer is not None:
            self._writer.finish_writing(limit_s, has_lost_rank)

    def close(self) -> None:
        """Releases the directory after the snapshot that is being written is complete."""
        if self._writer is not None:
            self._writer.close()

    def abandon(self) -> None:
        """Releases the directory immediately: this process is about to end with an error."""
        self._over = True
        if self._writer is not None:
            self._writer.release()

    def _write_failed(self, run: Path, reason: str, again: bool) -> None:
        found = read_state(run)
        if found is not None and (found.state == "done" or (self._begun and found.state != "running")):
            return  # the run has already ended, or another rank has reported its failure
        step = found.step if found is not None else 0
        goes_on = again and self._start_step is not None and step > self._start_step
        write_state(run, RunState("requeue" if goes_on else "failed", step, reason))

    def _on_saved(self, step: int) -> None:
        assert self._directory is not None
        if self._stop_requests is not None:
            self._stop_requests.measured(save_s=self._directory.saved.seconds)
        with self._writing_state:
            if self._over or (self._stop_requests is not None and self._stop_requests.is_lost()):
                return  # another rank has failed in the meantime: keep the state that it wrote
            self._write_state("running", step, "saved a snapshot")

    def _write_state(self, state: str, step: int, reason: str) -> None:
        if self._directories is None or self._group.world.rank != 0:
            return
        try:
            write_state(self._directories.run, RunState(state, step, reason))
        except DdpHpcError as error:
            self._progress.say(f"WARNING: {error}. Job scripts will not see step {step}")

    def _check(self, snapshot: Snapshot, state: TrainingState, num_samples: int | None) -> None:
        """Raises DataError unless the run can resume from the snapshot."""
        try:
            state.check(specs_of_saved(snapshot.model), str(snapshot.path))
            self._check_run(snapshot, num_samples)
            self._check_optimizer(snapshot, state)
            state.check_objects(snapshot.training, str(snapshot.path))
        except KeyError as error:
            raise DataError(
                f"{snapshot.path} was not written by ddp-hpc: {error} is missing. Use another --snapshot-dir"
            ) from None
        except TypeError:
            raise DataError(
                f"{snapshot.path} was not written by ddp-hpc: its description of the run is invalid. "
                "Use another --snapshot-dir"
            ) from None

    def _check_run(self, snapshot: Snapshot, num_samples: int | None) -> None:
        for name in _LOSS_OPTIONS:
            snapshot.about["config"][name]
        snapshot.about["layout"]
        _whole_numbers(asdict(Position(**snapshot.about["position"])), at_least=0)
        if not all(type(loss) is float for loss in asdict(Losses(**snapshot.about["losses"])).values()):
            raise TypeError
        numbers = {name: snapshot.about[name] for name in ("world_size", "global_batch", "lr_ranks")}
        _whole_numbers(numbers, at_least=1)
        had_samples = snapshot.about["num_samples"] != _NOT_COUNTED
        if num_samples != _NOT_COUNTED and had_samples != (num_samples is not None):
            raise DataError(
                f"{snapshot.path} was made {'with' if had_samples else 'without'} a loader. Call "
                f"ddp_hpc.snapshots() {'with' if had_samples else 'without'} loader=, or use another "
                "--snapshot-dir"
            )
        for name, value in self._order(num_samples).items():
            if (theirs := snapshot.about[name]) != value:
                raise DataError(
                    f"{snapshot.path} was made with {name.replace('_', ' ')} {theirs}, not {value}, so the "
                    "order of samples would differ. Use the same data and options, or another --snapshot-dir"
                )

    def _check_optimizer(self, snapshot: Snapshot, state: TrainingState) -> None:
        theirs, ours = snapshot.about["optimizer"], state.optimizer_names
        # Adam and AdamW store the same tensors.
        if theirs != ours and {theirs, ours} != {"Adam", "AdamW"}:
            raise DataError(
                f"{snapshot.path} was made with the optimizer {theirs}, not {ours}, whose state differs. "
                "Use the same --optimizer, or another --snapshot-dir"
            )

    def _order(self, num_samples: int | None) -> dict[str, Any]:
        """Returns the settings that determine the order of samples."""
        return {
            "num_samples": num_samples or _NOT_COUNTED,
            "seed": self._config.seed,
            "shuffle": self._config.data.shuffle,
        }

    def _global_batch(self) -> int:
        return self._config.data.batch_size * self._data_size * self._config.optimization.accumulate

    def _report_resumed(
        self, about: dict[str, Any], position: Position, exact: bool, has_samples: bool
    ) -> None:
        world_size = self._group.world.world_size
        used = f" (epoch {position.epoch + 1}, {position.begin:,} of its samples used)" if has_samples else ""
        self._progress.say(f"resuming after step {position.step}{used}")
        if about["world_size"] != world_size:
            ranks_before = about["world_size"]
            self._progress.say(f"note: the number of ranks changed from {ranks_before} to {world_size}")
        elif not exact:
            self._progress.say(
                "note: the parallel strategy or the kind of device changed: random numbers will differ"
            )
        if has_samples and about["global_batch"] != self._global_batch():
            self._progress.say(
                f"note: the global batch changed from {about['global_batch']} to {self._global_batch()} "
                "samples; the step count continues, and no sample of the epoch is used twice"
            )
        now, before = _as_json(self._config), about["config"]
        others = [
            f"{name} {now[name]} (was {before[name]})" for name in _LOSS_OPTIONS if now[name] != before[name]
        ]
        if others:
            self._progress.say(f"note: changed options: {', '.join(others)}")


def _whole_numbers(found: dict[str, Any], at_least: int) -> None:
    """Raises TypeError unless all values are integers from `at_least` to 2**63 - 1."""
    for value in found.values():
        if type(value) is not int or not at_least <= value < 2**63:
            raise TypeError


def keep_config(run: Path, config: TrainConfig) -> None:
    """Writes the options of this attempt to `config.toml` in the run directory, for `--config`."""
    # If tomli_w is not installed, for example, the run continues without the record of its options.
    with suppress(DdpHpcError, ModuleNotFoundError):
        write_atomically(run / "config.toml", as_toml(config).encode(), "config")


def _as_json(config: TrainConfig) -> dict[str, Any]:
    values = to_options(config).items()
    return {name: value if isinstance(value, int | float | None) else str(value) for name, value in values}


@contextmanager
def manage_run(config: TrainConfig, group: Group, progress: Progress, parts: Parts) -> Iterator[RunLifecycle]:
    """Sets up saving, stopping and resuming, stores the lifecycle in `parts`, and installs signal handlers.

    Collective: every rank must call this.

    Raises:
        RequestError: a variable for the deadline does not contain a time, or the time has passed.
    """
    environ = dict(os.environ)
    directories = find_run_directories(config, environ)
    found = group.comm.bcast(
        None if directories is None else [str(directories.run), str(directories.snapshots)]
    )
    directories = None if found is None else RunDirectories(*map(Path, found))
    deadline, delay_s = _deadline(group, environ, saves=directories is not None)
    if directories is None:
        if deadline is not None and config.snapshots.enabled:
            left_min = (deadline.at_s - time.time()) / 60
            progress.say(
                f"note: this job ends in {left_min:.0f} min and snapshots are off; "
                "use --snapshot-dir to save progress"
            )
        parts.lifecycle = RunLifecycle(config, group, progress, None, None)
        yield parts.lifecycle
        return
    stacks = directories.run / "stacks" / f"rank{group.world.rank:05d}-at-the-end.txt"
    watching = StopRequests(
        deadline,
        delay_s,
        ask=partial(current_end_s, environ) if group.world.rank == 0 else None,
        stacks=stacks,
        end_before_kill=parts.end_before_kill,
        is_lost=parts.is_lost,
    )
    with watching as stop_requests:
        parts.lifecycle = lifecycle = RunLifecycle(config, group, progress, directories, stop_requests)
        try:
            yield lifecycle
        except BaseException:
            lifecycle.abandon()
            raise
        lifecycle.close()


def _deadline(group: Group, environ: dict[str, str], *, saves: bool) -> tuple[Deadline | None, float | None]:
    """Returns rank 0's deadline and kill delay on every rank. Collective: every rank must call this."""
    found: tuple[list[Any] | None, float | None] = None, None
    with group.failing_together():
        if group.world.rank == 0:
            deadline = find_deadline(environ)
            found = ([deadline.at_s, deadline.source] if deadline else None), kill_delay_s(environ)
            if saves and deadline and (late_s := time.time() - deadline.at_s - (found[1] or 0.0)) > 0:
                raise RequestError(
                    f"the job's time limit passed {late_s:.0f} s ago according to {deadline.source}. "
                    "Unset the variables of an earlier job, or set DDP_HPC_DEADLINE to the correct end time"
                )
    ends, delay_s = group.comm.bcast(found)
    return (Deadline(*ends) if ends else None), delay_s
