"""Saves snapshots to the directory of a run in the background, and finds the newest valid one.

Only rank 0 reads and writes. For a save, the training waits for one copy of the state into a
reused buffer; a thread writes it from there.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.profiler import record_function

from ddp_hpc.errors import DataError
from ddp_hpc.training.snapshots.directory_lock import DirectoryLock
from ddp_hpc.training.snapshots.host_buffer import FileBuffer, Stream
from ddp_hpc.training.snapshots.snapshot_files import (
    MODEL,
    TRAINING,
    DamagedSnapshotError,
    Snapshot,
    discard,
    find_snapshots,
    read_snapshot,
    remove_leftovers,
    step_of,
    write_snapshot,
)
from ddp_hpc.units import format_bytes

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
_RETRY_AFTER_S = (1.0, 4.0, 15.0)

Say = Callable[[str], None]


class _LockLostError(OSError):
    """Another job holds the lock on the snapshot directory now."""


@dataclass(frozen=True)
class Saved:
    """The newest complete snapshot, and the duration of the last save."""

    step: int  # 0: there is no snapshot
    seconds: float


class SnapshotDirectory:
    """The snapshot directory on rank 0, which is locked until `close`.

    `say` is called with lines for the user, also from the writing thread. `on_saved` is called
    with the step of each complete snapshot, in that thread.

    Raises:
        DataError: on construction: another job uses the directory, or it cannot be written.
    """

    def __init__(self, directory: Path, keep: int, say: Say, on_saved: Callable[[int], None]) -> None:
        self.path = directory
        self._keep = keep
        self._say = say
        self._on_saved = on_saved
        self._lock = DirectoryLock(directory, say)
        self._buffers: dict[str, FileBuffer] = {}
        self._writer: threading.Thread | None = None
        # Other threads wait for this event, because a thread cannot be joined before it is started.
        self._nothing_to_write = threading.Event()
        self._nothing_to_write.set()
        self.saved = Saved(0, 0.0)
        remove_leftovers(directory)

    def newest_valid(self) -> Snapshot | None:
        """Returns the newest snapshot with correct checksums; None if there are no snapshots.

        Raises:
            DataError: none of the existing snapshots is valid, or one has a newer format.
        """
        found = find_snapshots(self.path)
        for path in found:
            try:
                snapshot = read_snapshot(path)
            except DamagedSnapshotError as error:
                self._say(f"warning: {error}; trying the previous snapshot")
                continue
            self.saved = Saved(step_of(path), 0.0)
            return snapshot
        if found:
            raise DataError(
                f"--snapshot-dir {self.path}: none of its {len(found)} snapshots is valid. "
                "Nothing was deleted; check the files, or use another directory to start from scratch"
            )
        return None

    def save(
        self,
        step: int,
        about: Mapping[str, Any],
        model: Stream,
        training: Stream,
        tick: Callable[[], None] = lambda: None,
    ) -> None:
        """Waits for the previous save like `wait`, copies the state, and starts a thread that writes it."""
        with record_function("snapshot"):
            self.wait(tick)
            for name, stream in ((MODEL, model), (TRAINING, training)):
                if name not in self._buffers or not self._buffers[name].matches(stream.specs):
                    # Free the memory of the old buffer before allocating another.
                    self._buffers.pop(name, None)
                    self._buffers[name] = FileBuffer(stream.specs, is_pinned=stream.is_pinned)
                self._buffers[name].fill(stream.tensors)
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

    def finish_writing(self, limit_s: float) -> None:
        """Waits until nothing is being written, at most `limit_s`. Can be called from any thread."""
        self._nothing_to_write.wait(limit_s)

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

    def _write(self, step: int, about: dict[str, Any]) -> None:
        """Writes a snapshot in the writing thread. If that fails, prints a warning; training continues."""
        _lower_priority()
        begin_s = time.monotonic()
        try:
            path = self._write_with_retries(step, about)
        except OSError as error:
            num_bytes = sum(buffer.num_bytes for buffer in self._buffers.values())
            newest = (
                f"the newest snapshot is still from step {self.saved.step}"
                if self.saved.step
                else "there is no snapshot yet"
            )
            self._say(
                f"WARNING: the snapshot of step {step} ({format_bytes(num_bytes)}) was NOT saved in "
                f"{self.path}: {error.strerror or error}; {newest}. Training continues; {_remedy(error)}"
            )
        else:
            self.saved = Saved(step_of(path), time.monotonic() - begin_s)
            self._on_saved(step)
            # Keep snapshots of later steps: the run resumed from an earlier one because they were damaged.
            with suppress(OSError, DataError):  # the next save attempts this again
                passed = [path for path in find_snapshots(self.path) if step_of(path) <= step]
                for old in passed[self._keep :]:
                    discard(old)
        finally:
            self._nothing_to_write.set()

    def _write_with_retries(self, step: int, about: dict[str, Any]) -> Path:
        for wait_s in (*_RETRY_AFTER_S, None):
            if self._lock.lost:
                raise _LockLostError(
                    "another job took over the directory because this job did not respond for too long"
                )
            try:
                return write_snapshot(self.path, step, about, self._buffers)
            except OSError as error:
                if error.errno not in _TRANSIENT or wait_s is None:
                    raise
                self._say(f"warning: the snapshot of step {step}: {error.strerror}; retrying in {wait_s:g} s")
                time.sleep(wait_s)
        raise AssertionError("unreachable")


def _remedy(error: OSError) -> str:
    """Returns what the user can do so that the next snapshot is saved."""
    if isinstance(error, _LockLostError):
        return "stop one of the two jobs"
    match error.errno:
        case errno.ENOSPC | errno.EDQUOT:
            return "free disk space"
        case errno.EACCES | errno.EPERM | errno.EROFS:
            return "make the directory writable"
        case _:
            return "check the file system"


def _lower_priority() -> None:
    """Lowers the priority of this thread: a step waits for the slowest thread of the training."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
