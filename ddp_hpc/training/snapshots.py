"""The snapshot folder of a run: saving beside the training, keeping a few, going on from the newest good one.

Rank 0 alone reads and writes. A save costs the training one copy of the state into memory
that is used again; a thread writes it from there.
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

from torch import Tensor
from torch.profiler import record_function

from ddp_hpc.errors import DataError
from ddp_hpc.training.folder_lock import FolderLock
from ddp_hpc.training.image import FileImage
from ddp_hpc.training.snapshot import (
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

# What a parallel file system says while a server of it restarts. A full disk is not among them.
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


@dataclass(frozen=True)
class Saved:
    """The newest complete snapshot, and what the last save took."""

    step: int  # 0: there is none
    seconds: float


class SnapshotFolder:
    """Rank 0's hold on the folder. `close` lets others have it.

    `say` gets lines for the user, also from the thread that writes. `on_saved` gets the step
    of each complete snapshot, in that thread.

    Raises:
        DataError: on construction: another job uses the folder, or it cannot be written.
    """

    def __init__(self, folder: Path, keep: int, say: Say, on_saved: Callable[[int], None]) -> None:
        self.path = folder
        self._keep = keep
        self._say = say
        self._on_saved = on_saved
        self._lock = FolderLock(folder, say)
        self._images: dict[str, FileImage] = {}
        self._writer: threading.Thread | None = None
        self.saved = Saved(0, 0.0)
        remove_leftovers(folder)

    def newest_good(self) -> Snapshot | None:
        """The newest snapshot whose checksums are right; None where there is no snapshot at all.

        Raises:
            DataError: there are snapshots, but no good one; or one of a newer format.
        """
        found = find_snapshots(self.path)
        for path in found:
            try:
                snapshot = read_snapshot(path)
            except DamagedSnapshotError as error:
                self._say(f"warning: {error}; the one before it is looked at")
                continue
            self.saved = Saved(step_of(path), 0.0)
            return snapshot
        if found:
            raise DataError(
                f"--snapshot-dir {self.path}: none of its {len(found)} snapshots is good; "
                "nothing was deleted; look into it, or name another folder to begin anew"
            )
        return None

    def save(
        self,
        step: int,
        about: Mapping[str, Any],
        model: Mapping[str, Tensor],
        training: Mapping[str, Tensor],
        tick: Callable[[], None] = lambda: None,
    ) -> None:
        """Copies the state and writes it in a thread; waits for the save before this one, as `wait` does."""
        with record_function("snapshot"):
            self.wait(tick)
            for name, tensors in ((MODEL, model), (TRAINING, training)):
                if name not in self._images or not self._images[name].fits(tensors):
                    self._images[name] = FileImage(tensors)
                self._images[name].fill(tensors)
        self._writer = threading.Thread(target=self._write, args=(step, dict(about)), name="save")
        self._writer.start()

    def wait(self, tick: Callable[[], None] = lambda: None) -> Saved:
        """Returns when nothing is being written any more; calls `tick` every few seconds meanwhile."""
        while self._writer is not None:
            tick()
            self._writer.join(_TICK_S)
            if not self._writer.is_alive():
                self._writer = None
        return self.saved

    @property
    def lost(self) -> bool:
        """Whether another job has taken the folder over."""
        return self._lock.lost

    def close(self) -> None:
        """Waits for the writer and lets others have the folder."""
        self.wait()
        self.release()

    def release(self) -> None:
        """Lets others have the folder."""
        self._lock.release()

    def _write(self, step: int, about: dict[str, Any]) -> None:
        """The writer's life. A save that fails costs a warning, not the training."""
        _step_back()
        begin_s = time.monotonic()
        try:
            path = self._write_patiently(step, about)
        except OSError as error:
            num_bytes = sum(image.bytes.numel() for image in self._images.values())
            newest = (
                f"the one of step {self.saved.step} stays the newest"
                if self.saved.step
                else "there is none yet"
            )
            self._say(
                f"WARNING: the snapshot of step {step} ({format_bytes(num_bytes)}) was NOT saved in "
                f"{self.path}: {error.strerror or error}; {newest}, and training goes on: make room"
            )
            return
        self.saved = Saved(step_of(path), time.monotonic() - begin_s)
        self._on_saved(step)
        # One of a later step was found damaged when the run went back behind it: it is nobody's to delete.
        with suppress(OSError, DataError):  # the next save tries again
            passed = [path for path in find_snapshots(self.path) if step_of(path) <= step]
            for old in passed[self._keep :]:
                discard(old)

    def _write_patiently(self, step: int, about: dict[str, Any]) -> Path:
        for wait_s in (*_RETRY_AFTER_S, None):
            if self._lock.lost:
                raise OSError(
                    errno.EBUSY, "another job has taken the folder over, as this one was silent for long"
                )
            try:
                return write_snapshot(self.path, step, about, self._images)
            except OSError as error:
                if error.errno not in _TRANSIENT or wait_s is None:
                    raise
                self._say(
                    f"warning: the snapshot of step {step}: {error.strerror}; tried again in {wait_s:g} s"
                )
                time.sleep(wait_s)
        raise AssertionError("unreachable")


def _step_back() -> None:
    """Lets the training's own threads go first: a step waits for the last of them."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
