"""Resumes, saves, stops and finishes a run on all ranks, as the other modules of this package decide.

Without a snapshot directory there is nothing to resume from, and signals end the run as they end any program.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

from ddp_hpc.base.errors import DdpHpcError, RequestError
from ddp_hpc.base.option_names import named
from ddp_hpc.base.run_outcomes import Stop
from ddp_hpc.data.step_shards import Position
from ddp_hpc.schedulers.deadline import Deadline, current_end_s, find_deadline, kill_delay_s
from ddp_hpc.training.config import TrainConfig
from ddp_hpc.training.health.rank_report import RankReport, RankReports
from ddp_hpc.training.parallel.device_mesh import Mesh
from ddp_hpc.training.process_group.group import Group
from ddp_hpc.training.run.directories import RunDirectories, find_run_directories
from ddp_hpc.training.run.end import end_before_kill
from ddp_hpc.training.run.parts import Parts
from ddp_hpc.training.run.record import RunRecord, Spent, record_done_without_snapshots
from ddp_hpc.training.run.restore import on_all_ranks, restore
from ddp_hpc.training.run.resumable import Losses, RunDescription
from ddp_hpc.training.run.save_schedule import CONTINUE, Decision, SaveSchedule, decide
from ddp_hpc.training.run.stop_protocol import OwnRequest
from ddp_hpc.training.run.stop_requests import StopRequests
from ddp_hpc.training.snapshots.host_buffer import num_bytes_of
from ddp_hpc.training.snapshots.joint_save import JointSave
from ddp_hpc.training.snapshots.random_state import seed_generators
from ddp_hpc.training.snapshots.snapshot_directory import SnapshotDirectory, SnapshotWriter
from ddp_hpc.training.snapshots.snapshot_files import Snapshot
from ddp_hpc.training.snapshots.training_state import TrainingState
from ddp_hpc.training.telemetry.progress import Progress

# Write speed of a busy parallel file system, assumed until the first save has been measured.
_SLOW_DISK_BYTES_PER_S = 200e6


class RunLifecycle:
    """Resumes, saves and stops the run on this rank. Created by `manage_run`."""

    def __init__(
        self,
        config: TrainConfig,
        group: Group,
        progress: Progress,
        directories: RunDirectories | None,
        record: RunRecord,
        stop_requests: StopRequests | None,
    ) -> None:
        self._config, self._group, self._progress = config, group, progress
        self.directories = directories
        self._record, self._stop_requests = record, stop_requests
        self._directory: SnapshotDirectory | None = None  # only on rank 0, if snapshots are enabled
        self._writer: SnapshotWriter | None = None  # on each rank that writes: all, if the state is sharded
        snapshots = config.snapshots
        self._schedule = SaveSchedule(snapshots.every_steps, snapshots.every_s, time.monotonic())
        self._save_s = self._data_s = 0.0
        self._spent_at: dict[int, Spent] = {}  # by the step of a snapshot that is being written
        self._num_exchanges = 0
        self._description: RunDescription | None = None  # set by `resume`
        self._lr_ranks = 1  # set by `resume`

    def open(self) -> Snapshot | None:
        """Locks the snapshot directory and returns its newest valid snapshot, or None if there is none.

        Collective: every rank must call this.

        Raises:
            DataError: another job uses the directory, or none of its snapshots is valid.
        """
        if self.directories is None:
            return None
        snapshot, keep = None, self._config.snapshots.keep
        with self._group.failing_together():
            if self._group.world.rank == 0:
                self._writer = self._directory = SnapshotDirectory(
                    self.directories.snapshots, keep, self._progress.say, self._on_saved
                )
                snapshot = self._directory.newest_valid()
                self._record.is_taken_over = lambda: self._directory is not None and self._directory.lost
        self._record.opened()
        return on_all_ranks(snapshot, self._group)

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
        now = self._description = RunDescription(
            config=self._config,
            world_size=self._group.world.world_size,
            data_size=mesh.data_size,
            layout=mesh.layout,
            num_samples=num_samples,
        )
        begin_s = time.monotonic()
        about, exact = restore(snapshot, state, now, self._group, self._directory)
        restore_s = time.monotonic() - begin_s
        if about is None:
            position, losses, self._lr_ranks = Position(), Losses(), mesh.data_size
        else:
            position, losses = Position(**about["position"]), Losses(**about["losses"])
            same_batch = about["global_batch"] == now.global_batch
            self._lr_ranks = about["lr_ranks"] if same_batch else mesh.data_size
            # With another layout, ranks that share samples would get different dropout masks.
            exact = exact and about["layout"] == now.layout
            if not exact:
                # This seed is deterministic, and differs from the seeds of earlier attempts.
                seed = self._config.rank_seed(mesh.data_rank) * 1_000_003 + position.step
                seed_generators(seed % 2**63)
            self._progress.say(f"resuming after step {_where(position, num_samples)}")
            for change in now.changes(about, is_exact=exact):
                self._progress.say(f"note: {change}")
        self._prepare_saves(state)
        if self._stop_requests is not None:
            # Adam stores two more values per parameter.
            num_bytes = 3 * num_bytes_of(state.whole)
            num_bytes //= self._group.world.world_size if state.is_sharded else 1
            self._stop_requests.expect_save(num_bytes / _SLOW_DISK_BYTES_PER_S)
        self._record.resumed(position.step, restore_s)
        self._schedule.saved()
        return position, losses, self._lr_ranks

    def begin(self) -> None:
        """Records that the run is running; see `RunRecord.begun`."""
        self._record.begun(self._config)
        self._schedule.saved()

    def _prepare_saves(self, state: TrainingState) -> None:
        """Creates a writer on all ranks if each writes its shards. Collective: every rank must call this."""
        if self.directories is None or not state.is_sharded:
            return
        group = self._group
        token = group.comm.bcast(f"{os.getpid()}-{secrets.token_hex(4)}")
        assert group.store is not None  # sharded tensors need a process group
        limit_s = self._config.process_group.timeout_s
        joint = JointSave(group.store, group.world.rank, group.world.world_size, limit_s, token)
        if self._writer is None:
            self._writer = SnapshotWriter(self.directories.snapshots, self._progress.say)
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
        due = self._directory is not None and self._schedule.is_overdue()
        stop_request = float(self._stop_requests.stop_request())
        return RankReport(stop_request, float(due), step_s, own_s, self._stop_requests.own.deadline_s)

    def waited_for_data(self, data_s: float) -> None:
        """Adds to the time in which rank 0 has waited for data."""
        self._data_s += data_s

    def evaluated(self, evaluation_s: float) -> None:
        """Records the duration of an evaluation, during which the run cannot stop."""
        if self._stop_requests is not None:
            self._stop_requests.measured(step_s=evaluation_s)

    def saves_at(self, step: int) -> bool:
        """Returns whether a snapshot is due after this step according to `--snapshot-every-steps`."""
        return self.directories is not None and self._schedule.is_due_at(step)

    def decide(self, reports: RankReports, position: Position, last: bool) -> Decision:
        """Returns the decision of all ranks after this step. The decision depends only on the reports of all
        ranks, so it is the same on every rank.
        """
        if self._stop_requests is None:
            return CONTINUE
        if self._stop_requests.move_deadline(deadline_s := reports.deadline_s()):
            at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(deadline_s))
            self._progress.say(f"note: the walltime of the job was changed; the job now ends at {at}")
        return decide(reports, self._schedule, self._stop_requests, position.step, is_last=last)

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
        self._group.agree(problem + self._group.comm.bcast(kept), DdpHpcError)
        raise AssertionError("unreachable")

    def check_parameters(self, step: int, state: TrainingState, tick: Callable[[], None]) -> None:
        """Raises DdpHpcError on all ranks if a parameter is not finite. Collective.

        Called before each save, so that the newest snapshot can always be resumed.
        """
        if bad := state.non_finite():
            name, rank = bad
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
        tick: Callable[[], None],
    ) -> None:
        """Copies the state, which a thread then writes. Collective: every rank must call this.

        `tick` is called every few seconds while the previous save is still being written.
        """
        begin_s = time.monotonic()
        model, training = state.model_tensors(), state.training_tensors()
        self._schedule.saved()
        if self._writer is not None:
            assert self._description is not None  # `resume` was called
            about = self._description.as_dict(position, losses, state.optimizer_names, self._lr_ranks)
            self._writer.save(position.step, about, model, training, tick)
        else:  # tensors that are sharded over some of the ranks are gathered on rank 0
            for _ in chain(model.tensors, training.tensors):
                pass
        self._save_s += time.monotonic() - begin_s
        if self._directory is not None:
            self._spent_at[position.step] = self._spent()

    def finish(self, position: Position, stop: Stop | None, tick: Callable[[], None]) -> None:
        """Waits for the last save and writes the final state to the run directory. Collective.

        `tick` is called every few seconds meanwhile.

        Raises:
            DdpHpcError: the last state could not be saved.
        """
        if self.directories is None:
            self._record.steps_ended(position.step, self._spent())
            if self._group.world.rank == 0:
                record_done_without_snapshots(os.environ, self._progress.say)
            return
        problem, begin_s = "", time.monotonic()
        saved = self._writer.wait(tick) if self._writer is not None else None
        self._save_s += time.monotonic() - begin_s
        if self._directory is not None and saved is not None:
            if saved.step != position.step:
                problem = (
                    f"could not save step {position.step} in {self.directories.snapshots}; "
                    f"the newest snapshot is from step {saved.step}. Free disk space, then run the "
                    "same command again"
                )
            else:
                self._record.steps_ended(position.step, self._spent())
                self._record.ended(position.step, stop)
        self._group.agree(problem, DdpHpcError)

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
        self._record.failing()
        if self._writer is not None:
            self._writer.release()

    def _on_saved(self, step: int) -> None:
        assert self._directory is not None
        requests = self._stop_requests
        if requests is not None:
            requests.measured(save_s=self._directory.saved.seconds)
        # A small snapshot can be complete before `save` has returned.
        spent = self._spent_at.pop(step, None) or self._spent()
        self._record.saved(step, spent, is_rank_lost=requests is not None and requests.is_lost())

    def _spent(self) -> Spent:
        return Spent(time.time(), self._save_s, self._data_s)


def _where(position: Position, num_samples: int | None) -> str:
    if num_samples is None:
        return str(position.step)
    return f"{position.step} (epoch {position.epoch + 1}, {position.begin:,} of its samples used)"


@contextmanager
def manage_run(config: TrainConfig, group: Group, progress: Progress, parts: Parts) -> Iterator[RunLifecycle]:
    """Sets up saving, stopping and resuming, fills in `parts`, and installs signal handlers.

    Collective: every rank must call this.

    Raises:
        RequestError: a variable for the deadline does not contain a time, or the time has passed.
    """
    environ = dict(os.environ)
    directories = find_run_directories(config, environ)
    paths = group.comm.bcast(
        None if directories is None else [str(directories.run), str(directories.snapshots)]
    )
    directories = None if paths is None else RunDirectories(*map(Path, paths))
    is_rank_0 = group.world.rank == 0
    deadline, delay_s = _deadline(group, environ, saves=directories is not None)
    if directories is None:
        if deadline is not None and config.snapshots.enabled:
            left_min = (deadline.at_s - time.time()) / 60
            progress.say(
                f"note: this job ends in {left_min:.0f} min and snapshots are off; "
                f"use {named('snapshot_dir')} to save progress"
            )
        record = RunRecord(None, is_rank_0=is_rank_0, say=progress.say)
        yield RunLifecycle(config, group, progress, None, record, None)
        return
    stacks = directories.stacks / f"rank{group.world.rank:05d}-at-the-end.txt"
    watching = StopRequests(
        OwnRequest(deadline, partial(current_end_s, environ) if is_rank_0 else None),
        delay_s,
        stacks=stacks,
        end_before_kill=partial(end_before_kill, parts),
        is_lost=parts.is_lost,
    )
    with watching as stop_requests:
        parts.record = record = RunRecord(directories.run, is_rank_0=is_rank_0, say=progress.say)
        lifecycle = RunLifecycle(config, group, progress, directories, record, stop_requests)
        parts.finish_writing, parts.run_dir = lifecycle.finish_writing, directories.run
        try:
            yield lifecycle
        except BaseException:
            lifecycle.abandon()
            raise
        lifecycle.close()


def _deadline(group: Group, environ: dict[str, str], *, saves: bool) -> tuple[Deadline | None, float | None]:
    """Returns rank 0's deadline and kill delay on every rank. Collective: every rank must call this."""
    known: tuple[list[Any] | None, float | None] = None, None
    with group.failing_together():
        if group.world.rank == 0:
            deadline = find_deadline(environ)
            known = ([deadline.at_s, deadline.source] if deadline else None), kill_delay_s(environ)
            if saves and deadline and (late_s := time.time() - deadline.at_s - (known[1] or 0.0)) > 0:
                raise RequestError(
                    f"the job's time limit passed {late_s:.0f} s ago according to {deadline.source}. "
                    "Unset the variables of an earlier job, or set DDP_HPC_DEADLINE to the correct end time"
                )
    ends, delay_s = group.comm.bcast(known)
    return (Deadline(*ends) if ends else None), delay_s
