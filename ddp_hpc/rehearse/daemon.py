"""The base class of the daemons of all stand-ins. A daemon is the process that runs one job."""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO

from ddp_hpc.base import process_control
from ddp_hpc.rehearse import jobs
from ddp_hpc.rehearse.settings import Settings


class Daemon:
    """The daemon of one job. Subclasses implement `run`, which runs the job until it has ended."""

    def __init__(self, root: Path, number: int, settings: Settings) -> None:
        self.root = root
        self.number = number
        self.keeper_pid = settings.keeper_pid
        self.job = jobs.load(root, number)
        self.delete_request = jobs.delete_request(root, number)
        self.rerun_request = jobs.rerun_request(root, number)

    def update(self, **attributes: object) -> None:
        """Changes attributes of the job without losing concurrent changes by other processes."""
        self.job = jobs.change(self.root, self.number, **attributes)

    def keeper_is_gone(self) -> bool:
        """Returns whether the rehearsal has ended, and the job must therefore be killed."""
        return bool(self.keeper_pid) and not process_control.is_running(self.keeper_pid)


def open_log(path: Path, flags: int, mode: int) -> IO[bytes]:
    """Opens a log file for unbuffered writing; creates it with `mode` if it does not exist."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | flags, mode), "wb", buffering=0)
