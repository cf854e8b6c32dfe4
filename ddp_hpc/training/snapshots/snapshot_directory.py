"""Saves snapshots to the directory of a run in the background, and finds the newest valid one.

Rank 0 locks the directory. It writes whole tensors alone; sharded tensors are written by all ranks. For a
save, the training waits for one copy of the rank's state into a reused buffer; a thread writes it from there.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ddp_hpc.base.errors import DataError, RendezvousError
from ddp_hpc.base.option_names import named
from ddp_hpc.base.units import format_bytes
from ddp_hpc.training.snapshots.directory_lock import DirectoryLock
from ddp_hpc.training.snapshots.host_buffer import FileBuffer, Place, Stream
from ddp_hpc.training.snapshots.joint_save import JointSave, NotSavedError
from ddp_hpc.training.snapshots.shard_file import (
    CHUNK_BYTES,
    SECTIONS,
    Header,
    WrittenShards,
    shard_file,
    write_shards,
)
from ddp_hpc.training.snapshots.shard_index import index_of, read_header, report_of_rank
from ddp_hpc.training.snapshots.snapshot_files import (
    Snapshot,
    complete_snapshot,
    discard,
    find_snapshots,
    partial_directory,
    read_snapshot,
    remove_leftovers,
    step_of,
)
from ddp_hpc.training.snapshots.verified_file import DamagedSnapshotError
from ddp_hpc.training.telemetry.trace_annotations import annotated

# Errors that a parallel file system returns while one of its servers restarts. A full disk is not temporary.
_TRANSIENT = {
    errno.EIO,
    errno.ESTALE,
    errno.ETIMEDOUT,
    errno.EAGAIN,
    errno.EBUSY,
    errno.ENOTCONN,
    errno.ESHUTDOWN,
}
_NICE = 10
_TICK_S = 5.0
_LOOK_S = 0.1
_RETRY_AFTER_S = (1.0, 4.0, 15.0)

Say = Callable[[str], None]
T = TypeVar("T")


class _LockLostError(OSError):
    """Another job holds the lock on the snapshot directory now."""


@dataclass(frozen=True)
class Saved:
    """The newest complete snapshot, and the duration of the last save."""

    step: int  # 0: there is no snapshot
    seconds: float


class SnapshotWriter:
    """Writes this rank's part of the snapshots in a background thread.

    If the state is sharded, each rank creates a SnapshotWriter, and all write their shards to the same
    snapshot; `joint` connects them. By default, rank 0 alone writes whole tensors. `say` is called with lines
    for the user, also from the writing thread.
    """

    def __init__(self, directory: Path, say: Say, joint: JointSave | None = None) -> None:
        self.path = directory
        self.joint = joint or JointSave(None, 0, 1, 0.0, str(os.getpid()))
        self._say = say
        self._buffers: dict[str, FileBuffer] = {}
        self._places: dict[str, Mapping[str, Place]] = {}
        self._writer: threading.Thread | None = None
        # Other threads wait for this event, because a thread cannot be joined before it is started.
        self._nothing_to_write = threading.Event()
        self._nothing_to_write.set()
        self.saved = Saved(0, 0.0)

    def save(
        self,
        step: int,
        about: Mapping[str, Any],
        model: Stream,
        training: Stream,
        tick: Callable[[], None] = lambda: None,
    ) -> None:
        """Waits for the previous save like `wait`, copies the state, and starts a thread that writes it.

        Collective if the state is sharded: every rank must call this.
        """
        with annotated("snapshot"):
            self.wait(tick)
            for section, stream in zip(SECTIONS, (model, training), strict=True):
                if not stream.specs:
                    continue  # this rank holds only copies
                if section not in self._buffers or not self._buffers[section].matches(stream.specs):
                    # Free the memory of the old buffer before allocating another.
                    self._buffers.pop(section, None)
                    self._buffers[section] = FileBuffer(stream.specs, is_pinned=stream.is_pinned)
                self._buffers[section].fill(stream.tensors)
                self._places[section] = stream.places
        self._writer = threading.Thread(target=self._write, args=(step, dict(about)), name="save")
        self._nothing_to_write.clear()
        try:
            self._writer.start()
        except BaseException:
            self._writer = None
            self._nothing_to_write.set()
            raise

    def wait(self, tick: Callable[[], None] = lambda: None) -> Saved:
        """Waits until nothing is being written; calls `tick` every few seconds meanwhile."""
        while self._writer is not None:
            tick()
            self._writer.join(_TICK_S)
            if not self._writer.is_alive():
                self._writer = None
        return self.saved

    def finish_writing(self, limit_s: float, has_lost_rank: Callable[[], bool] = lambda: False) -> None:
        """Waits until nothing is being written, at most `limit_s`. Can be called from any thread.

        A snapshot for which the part of a lost rank is missing is discarded immediately.
        """
        end_s = time.monotonic() + limit_s
        while (left_s := end_s - time.monotonic()) > 0:
            if has_lost_rank():
                self.joint.give_up()
            if self._nothing_to_write.wait(min(left_s, _LOOK_S)):
                return

    def close(self) -> None:
        """Waits until nothing is being written."""
        self.wait()

    def release(self) -> None:
        """Releases the directory immediately: this process is about to end with an error."""

    def _write(self, step: int, about: dict[str, Any]) -> None:
        """Writes a snapshot in the writing thread. If that fails, training continues."""
        _lower_priority()
        begin_s = time.monotonic()
        try:
            self._write_part(step, about)
        except (OSError, RendezvousError) as error:
            self._failed(step, error)
        else:
            self.saved = Saved(step, time.monotonic() - begin_s)
            self._succeeded(step)
        finally:
            self._nothing_to_write.set()

    def _write_part(self, step: int, about: dict[str, Any]) -> None:
        """Writes this rank's files, and waits until rank 0 has completed the snapshot."""
        del about  # only rank 0 writes the description
        self.joint.exchange(step, self._own_part(step))
        self.joint.wait_for_decision(step)

    def _own_part(self, step: int) -> dict[str, Any] | OSError:
        """Writes this rank's shards; returns what rank 0 must know about them, or the error."""
        try:
            return self._with_retries(step, lambda: self._write_shards(step))
        except _LockLostError:
            raise
        except OSError as error:
            return error
        except Exception as error:  # the other ranks must not wait for this one
            return OSError(0, f"{type(error).__name__}: {error}")

    def _write_shards(self, step: int) -> dict[str, Any]:
        """Writes this rank's files, which replace those of an earlier attempt; returns its report."""
        partial = self._partial(step)
        partial.mkdir(exist_ok=True)
        files: dict[str, WrittenShards] = {}
        specs = {section: buffer.specs for section, buffer in self._buffers.items()}
        for section, buffer in self._buffers.items():
            buffer.wait()
            path = partial / shard_file(section, self.joint.rank)
            path.unlink(missing_ok=True)
            files[section] = write_shards(path, buffer, self._places[section], CHUNK_BYTES)
        return report_of_rank(files, specs, self._places)

    def _partial(self, step: int) -> Path:
        """Returns the directory in which all ranks write the snapshot."""
        return partial_directory(self.path, step, self.joint.token)

    def _succeeded(self, step: int) -> None:
        """Called after a snapshot is complete."""

    def _failed(self, step: int, error: OSError | RendezvousError) -> None:
        """Called if a snapshot was not saved. Rank 0 informs the user."""

    def _with_retries(self, step: int, write: Callable[[], T]) -> T:
        for wait_s in (*_RETRY_AFTER_S, None):
            self._check_lock()
            try:
                return write()
            except OSError as error:
                if error.errno not in _TRANSIENT or wait_s is None:
                    raise
                self._say(
                    f"warning: the snapshot of step {step} cannot be written ({error.strerror}); retrying in "
                    f"{wait_s:g} s"
                )
                time.sleep(wait_s)
        raise AssertionError("unreachable")

    def _check_lock(self) -> None:
        """Raises OSError if another job has taken over the directory."""


class SnapshotDirectory(SnapshotWriter):
    """The snapshot directory on rank 0, which is locked until `close`.

    `on_saved` is called with the step of each complete snapshot, in the writing thread.

    Raises:
        DataError: on construction: another job uses the directory, or it cannot be written.
    """

    def __init__(self, directory: Path, keep: int, say: Say, on_saved: Callable[[int], None]) -> None:
        super().__init__(directory, say)
        self._keep = keep
        self._on_saved = on_saved
        self._lock = DirectoryLock(directory, say)
        remove_leftovers(directory)

    def newest_valid(self, before: int | None = None) -> Snapshot | None:
        """Returns the newest snapshot that is valid, as far as it has been read; None if there are none.

        With `before`, only snapshots of earlier steps are considered: that of this step is damaged.

        Raises:
            DataError: none of the existing snapshots is valid, or one has a newer format.
        """
        snapshots = find_snapshots(self.path)
        for path in snapshots:
            if before is not None and step_of(path) >= before:
                continue
            try:
                snapshot = read_snapshot(path)
            except DamagedSnapshotError as error:
                self.skip(error)
                continue
            self.saved = Saved(step_of(path), 0.0)
            return snapshot
        if snapshots:
            raise DataError(
                f"{named('snapshot_dir')} {self.path}: none of its {len(snapshots)} snapshots is valid. "
                "Nothing was deleted; check the files, or use another directory to start from scratch"
            )
        return None

    def skip(self, error: DamagedSnapshotError) -> None:
        """Warns that a damaged snapshot is not used."""
        self._say(f"warning: {error}; trying the previous snapshot")

    @property
    def lost(self) -> bool:
        """Returns whether another job has taken over the directory."""
        return self._lock.lost

    def close(self) -> None:
        """Waits until nothing is being written, and releases the lock on the directory."""
        self.wait()
        self.release()

    def release(self) -> None:
        """Releases the lock on the directory."""
        self._lock.release()

    def _write_part(self, step: int, about: dict[str, Any]) -> None:
        problem, partial = "rank 0 failed", self._partial(step)
        try:
            reports = self.joint.exchange(step, self._own_part(step))
            _check_shared(partial, reports)
            index = index_of(reports, lambda *of_file: _header(partial, reports, *of_file))
            self._with_retries(step, lambda: complete_snapshot(partial, self.path, step, {**about, **index}))
            problem = ""
        except OSError as error:
            problem = error.strerror or str(error)
            raise
        except (ValueError, DamagedSnapshotError) as error:  # a defect, or an unreadable file
            problem = str(error)
            raise NotSavedError(0, problem) from error
        finally:
            if problem:
                shutil.rmtree(partial, ignore_errors=True)
            self.joint.decide(step, problem)

    def _succeeded(self, step: int) -> None:
        self._on_saved(step)
        # Keep snapshots of later steps: the run resumed from an earlier one because they were damaged.
        with suppress(OSError, DataError):  # the next save attempts this again
            passed = [path for path in find_snapshots(self.path) if step_of(path) <= step]
            for old in passed[self._keep :]:
                discard(old)

    def _failed(self, step: int, error: OSError | RendezvousError) -> None:
        own_bytes = sum(buffer.num_bytes for buffer in self._buffers.values())
        size = f" ({format_bytes(own_bytes)})" if self.joint.world_size == 1 else ""
        newest = (
            f"the newest snapshot is still from step {self.saved.step}"
            if self.saved.step
            else "there is no snapshot yet"
        )
        reason = getattr(error, "strerror", None) or error
        self._say(
            f"WARNING: the snapshot of step {step}{size} was NOT saved in {self.path}: {reason}; {newest}. "
            + ("The run ends" if self.joint.is_given_up else f"Training continues; {_remedy(error)}")
        )

    def _check_lock(self) -> None:
        if self._lock.lost:
            raise _LockLostError(
                "another job took over the directory because this job did not respond for too long"
            )


def _check_shared(partial: Path, reports: list[dict[str, Any]]) -> None:
    """Raises NotSavedError if this rank cannot see a file that another rank has written."""
    for rank, report in enumerate(reports):
        if not all((partial / shard_file(section, rank)).exists() for section in report["files"]):
            raise NotSavedError(
                errno.ENOENT,
                f"rank 0 does not see the files of rank {rank}: the directory must be on a file system that "
                "all nodes share",
            )


def _header(partial: Path, reports: list[dict[str, Any]], section: str, rank: int) -> Header:
    """Reads the header of a file that a rank has just written."""
    return read_header(partial / shard_file(section, rank), WrittenShards(*reports[rank]["files"][section]))


def _remedy(error: OSError | RendezvousError) -> str:
    """Returns what the user can do so that the next snapshot is saved."""
    if isinstance(error, _LockLostError):
        return "stop one of the two jobs"
    match getattr(error, "errno", None):
        case errno.ENOSPC | errno.EDQUOT:
            return "free disk space"
        case errno.ENOENT:
            return f"use another {named('snapshot_dir')}"
        case errno.EACCES | errno.EPERM | errno.EROFS:
            return "make the directory writable"
        case _:
            return "check the file system"


def _lower_priority() -> None:
    """Lowers the priority of this thread: a step waits for the slowest thread of the training."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
