"""Restores the newest snapshot of a run that is not damaged, on all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ddp_hpc.base.errors import DataError, DdpHpcError
from ddp_hpc.data.step_shards import Position
from ddp_hpc.training.process_group.group import Group
from ddp_hpc.training.run.resumable import RunDescription
from ddp_hpc.training.snapshots.snapshot_directory import SnapshotDirectory
from ddp_hpc.training.snapshots.snapshot_files import Snapshot, read_snapshot
from ddp_hpc.training.snapshots.training_state import TrainingState
from ddp_hpc.training.snapshots.verified_file import DamagedSnapshotError

# The parts of the description that each rank reads itself, and that can be large.
_INDEX = ("files", "tensors", "shards")


def on_all_ranks(snapshot: Snapshot | None, group: Group) -> Snapshot | None:
    """Returns rank 0's snapshot on all ranks. Collective: every rank must call this."""
    path = group.comm.bcast("" if snapshot is None else str(snapshot.path))
    with group.failing_together():
        if path and snapshot is None:
            try:
                return read_snapshot(Path(path), checks_sizes=False)
            except DdpHpcError as error:
                raise DataError(
                    f"{error}. Rank 0 could read it: the directory must be on a file system that all nodes "
                    "share"
                ) from error
    return snapshot


def restore(
    snapshot: Snapshot | None,
    state: TrainingState,
    now: RunDescription,
    group: Group,
    directory: SnapshotDirectory | None,
) -> tuple[dict[str, Any] | None, bool]:
    """Restores the snapshot, or the newest older one that is not damaged. Returns its description, and
    whether the random number generators were restored, too.

    `directory` is that of rank 0; None on the other ranks. Collective: every rank must call this.
    """
    while True:
        with group.failing_together():
            if snapshot is not None and group.world.rank == 0:
                _check(snapshot, state, now)
        about: dict[str, Any] | None = group.comm.bcast(
            None if snapshot is None else {k: v for k, v in snapshot.about.items() if k not in _INDEX}
        )
        if about is None or snapshot is None:
            return None, False
        try:
            return about, state.restore(snapshot)
        except DamagedSnapshotError as error:
            older = None
            with group.failing_together():
                if directory is not None:
                    directory.skip(error)
                    older = directory.newest_valid(before=Position(**about["position"]).step)
            snapshot = on_all_ranks(older, group)


def _check(snapshot: Snapshot, state: TrainingState, now: RunDescription) -> None:
    """Raises DataError unless the run can resume from the snapshot."""
    try:
        state.check(snapshot.model.specs, str(snapshot.path))
        now.check(snapshot.about, snapshot.path, state.optimizer_names)
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
