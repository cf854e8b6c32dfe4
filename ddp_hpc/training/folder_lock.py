"""One running job a snapshot folder: a lock that a crash of its holder does not leave shut.

File locks of the kernel do not reach other nodes on every parallel file system, and outlive
nobody on others. So the holder touches a file all the time; who finds it untouched for a
while takes it over. On one host it is enough that the holder's process is gone.
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

from ddp_hpc.errors import DataError
from ddp_hpc.partial_files import partial_file, process_home, process_stat

TOUCH_S = 5.0
# A file system may take its time to show one node what another one wrote.
STALE_S = 45.0
_NAME = ".lock"
_SETTLE_S = 0.5


class FolderLock:
    """The lock on `folder`, which is made if need be; held from here to `release`.

    `waits` is called once, with words for the user, where it is not clear at once whether the
    holder is alive.

    Raises:
        DataError: another running job has it, or the folder cannot be written.
    """

    def __init__(self, folder: Path, waits: Callable[[str], None], stale_s: float = STALE_S) -> None:
        self._path = folder / _NAME
        self._nonce = secrets.token_hex(8)
        self._released = threading.Event()
        self.lost = False
        """Another job has taken it over, as this one was silent for too long: it must not write any more."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._take(waits, stale_s)
        except OSError as error:
            raise DataError(
                f"--snapshot-dir {folder}: is no folder that can be written; name another"
            ) from error
        threading.Thread(target=self._keep, name="snapshot lock", daemon=True).start()

    def release(self) -> None:
        """Lets others have the folder."""
        self._released.set()
        with suppress(OSError):
            if self._is_ours():
                self._path.unlink()

    def _take(self, waits: Callable[[str], None], stale_s: float) -> None:
        holder = {
            "nonce": self._nonce,
            "home": process_home(),
            "pid": os.getpid(),
            "started": _start_of(os.getpid()),
            "host": os.uname().nodename,
            "job": os.environ.get("SLURM_JOB_ID") or os.environ.get("PBS_JOBID") or "",
        }
        text = json.dumps(holder)
        try:
            file = self._path.open("x")
        except FileExistsError:
            self._wait_for_silence(waits, stale_s)
        else:
            try:
                with file:
                    file.write(text)
            except OSError:  # a full disk
                self._path.unlink()
                raise
            return
        # Two may come here at once: the one whose words are there after a moment has it.
        with partial_file(self._path, self._nonce) as partial:
            partial.write_text(text)
            partial.replace(self._path)
        time.sleep(_SETTLE_S)
        if not self._is_ours():
            self._refuse(self._read())

    def _wait_for_silence(self, waits: Callable[[str], None], stale_s: float) -> None:
        """Returns when the holder is gone; refuses when it gives a sign of life."""
        holder, touched = self._read(), self._touched()
        if holder.get("home") == process_home() and isinstance(pid := holder.get("pid"), int):
            if _start_of(pid) != holder.get("started"):
                return
            self._refuse(holder)
        if touched is None:
            return
        waits(f"waiting {stale_s:g} s to see whether {_words(holder)} still uses {self._path.parent}")
        end_s = time.monotonic() + stale_s
        while time.monotonic() < end_s:
            time.sleep(min(1.0, stale_s / 10))
            if (now := self._touched()) is None:
                return
            if now != touched:
                self._refuse(holder)

    def _refuse(self, holder: dict[str, Any]) -> None:
        raise DataError(
            f"--snapshot-dir {self._path.parent}: {_words(holder)} is using it; "
            "wait for its end, or name another folder"
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
            found = json.loads(self._path.read_bytes())
        except (FileNotFoundError, ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    def _touched(self) -> int | None:
        """When, by the clock of the file system; only compared with itself. None: it is gone."""
        try:
            return self._path.stat().st_mtime_ns
        except FileNotFoundError:
            return None


def _start_of(pid: int) -> str:
    """When the process began, which tells it from a later one of that id; empty: it has ended."""
    fields = process_stat(pid)
    return fields[19] if fields and fields[0] not in "ZX" else ""


def _words(holder: dict[str, Any]) -> str:
    job = f"job {holder['job']}" if holder.get("job") else "another run"
    return f"{job} (process {holder.get('pid', '?')} on {holder.get('host', '?')})"
