"""A lock that allows one running job per snapshot directory, and expires if its holder crashes.

The kernel's file locks do not work across nodes on every parallel file system. The holder therefore touches a
file regularly, and another job takes over a file that has not been touched for some time. On the same host,
another job takes over the file as soon as the holder's process has exited.
"""

from __future__ import annotations

import json
import os
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ddp_hpc.base.atomic_files import partial_file, process_home, remove_leftovers
from ddp_hpc.base.errors import DataError
from ddp_hpc.base.option_names import named
from ddp_hpc.base.process_status import is_gone, process_started
from ddp_hpc.schedulers.deadline import job_and_start

TOUCH_S = 5.0
# A file system may show changes to other nodes with a delay.
STALE_S = 45.0
_NAME = ".lock"
_SETTLE_S = 0.5


class DirectoryLock:
    """A lock on `directory`, which is created if necessary. The lock is held until `release`.

    `waits` is called once, with a message for the user, if it is not immediately clear whether
    the holder is alive.

    Raises:
        DataError: another running job holds the lock, or the directory cannot be written.
    """

    def __init__(self, directory: Path, waits: Callable[[str], None], stale_s: float = STALE_S) -> None:
        self._path = directory / _NAME
        self._nonce = secrets.token_hex(8)
        self._released = threading.Event()
        self.lost = False
        """True after another job took over the lock; this job must then stop writing."""
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._take(waits, stale_s)
        except OSError as error:
            raise DataError(
                f"cannot write to {named('snapshot_dir')} {directory}; use another directory"
            ) from error
        threading.Thread(target=self._keep, name="snapshot lock", daemon=True).start()

    def release(self) -> None:
        """Releases the lock on the directory."""
        self._released.set()
        with suppress(OSError):
            if self._is_ours():
                self._path.unlink()

    def _take(self, waits: Callable[[str], None], stale_s: float) -> None:
        job, start = job_and_start(os.environ)
        holder = {
            "nonce": self._nonce,
            "home": process_home(),
            "pid": os.getpid(),
            "started": process_started(os.getpid()),
            "host": os.uname().nodename,
            "job": job,
            "start": start,
        }
        text = json.dumps(holder)
        try:
            file = self._path.open("x")
        except FileExistsError:
            self._wait_until_abandoned(waits, stale_s)
        else:
            try:
                with file:
                    file.write(text)
            except OSError:  # the disk may be full
                self._path.unlink()
                raise
            return
        # Two jobs may get here at the same time: the one whose file remains after a moment holds the lock.
        remove_leftovers(self._path.parent, "lock")
        with partial_file(self._path, "lock") as partial:
            with partial.open("x") as file:
                file.write(text)
            partial.replace(self._path)
        time.sleep(_SETTLE_S)
        if not self._is_ours():
            self._refuse(self._read())

    def _wait_until_abandoned(self, waits: Callable[[str], None], stale_s: float) -> None:
        """Waits until the holder of the lock is gone; raises DataError if it is alive."""
        holder, touched = self._read(), self._touched()
        if holder.get("home") == process_home() and isinstance(pid := holder.get("pid"), int):
            if is_gone(pid, holder.get("started")):
                return
            self._refuse(holder)
        if touched is None or _is_earlier_start(holder):
            return
        waits(f"waiting {stale_s:g} s to check whether {_describe(holder)} still uses {self._path.parent}")
        end_s = time.monotonic() + stale_s
        while time.monotonic() < end_s:
            time.sleep(min(1.0, stale_s / 10))
            if (now := self._touched()) is None:
                return
            if now != touched:
                self._refuse(holder)

    def _refuse(self, holder: dict[str, Any]) -> None:
        raise DataError(
            f"{named('snapshot_dir')} {self._path.parent} is in use by {_describe(holder)}; "
            "wait until that job ends, or use another directory"
        )

    def _keep(self) -> None:
        while not self._released.wait(TOUCH_S):
            with suppress(OSError):
                if not self._is_ours():
                    self.lost = not self._released.is_set()
                    return
                os.utime(self._path)

    def _is_ours(self) -> bool:
        return self._read().get("nonce") == self._nonce

    def _read(self) -> dict[str, Any]:
        try:
            holder = json.loads(self._path.read_bytes())
        except (FileNotFoundError, ValueError, RecursionError):
            return {}
        return holder if isinstance(holder, dict) else {}

    def _touched(self) -> int | None:
        """Returns the modification time, which is only compared with earlier ones; None if the file no longer
        exists.
        """
        try:
            return self._path.stat().st_mtime_ns
        except FileNotFoundError:
            return None


def _is_earlier_start(holder: dict[str, Any]) -> bool:
    """Returns whether the holder belongs to an earlier start of this job, which the scheduler has requeued.

    A scheduler requeues a job when it has ended or lost the earlier ranks. Ranks on a node that is only cut
    off find out that the lock was taken over, as after any other takeover.
    """
    job, start = job_and_start(os.environ)
    return bool(job) and holder.get("job") == job and holder.get("start", start) != start


def _describe(holder: dict[str, Any]) -> str:
    job = f"job {holder['job']}" if holder.get("job") else "another run"
    return f"{job} (PID {holder.get('pid', '?')} on {holder.get('host', '?')})"
