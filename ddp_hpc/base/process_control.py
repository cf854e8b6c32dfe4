"""Finds processes in /proc by parent or session, signals them, and ends all processes of a job."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ddp_hpc.base.process_status import process_stat

# The parent directory of the package, for Python processes that start without site-packages.
PACKAGES = Path(__file__).resolve().parents[2]

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)
"""The signals with which schedulers, launchers and users ask a program to stop."""
_KILL_S = 10.0
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36

UMASK = "DDP_HPC_UMASK"
"""The umask of the job script, for the ranks of all nodes. Daemons start ranks with a umask of their own: 077
on the other nodes of a PBS job, with pbs_tmrsh."""


def umask_text() -> str:
    """Returns the umask of this process as an octal number."""
    umask = os.umask(0o077)
    os.umask(umask)
    return f"{umask:04o}"


def set_umask(environ: Mapping[str, str]) -> None:
    """Sets the umask of the job script. Without a valid DDP_HPC_UMASK, the umask is not changed."""
    if re.fullmatch(r"0?[0-7]{3}", text := environ.get(UMASK, "")):
        os.umask(int(text, 8))


@dataclass(frozen=True)
class Process:
    """One process, read from /proc/PID/stat. This module ignores zombies."""

    pid: int
    parent: int
    session: int


def processes() -> list[Process]:
    """Returns all processes of the machine."""
    alive = []
    for path in Path("/proc").glob("[0-9]*"):
        state, parent, _, session = (process_stat(int(path.name)) or ["X", "", "", ""])[:4]
        if state not in "ZX":
            alive.append(Process(int(path.name), int(parent), int(session)))
    return alive


def of_session(number: int) -> list[Process]:
    """Returns the processes of one session."""
    return [process for process in processes() if process.session == number]


def descendants(*ancestors: int, without: Collection[int] = ()) -> list[Process]:
    """Returns all descendants of these processes, in any session.

    The processes `without` and their descendants are omitted.
    """
    everything = [process for process in processes() if process.pid not in without]
    family = set(ancestors)
    while children := {p.pid for p in everything if p.parent in family} - family:
        family |= children
    return [p for p in everything if p.pid in family and p.pid not in ancestors]


def send(number: int, targets: Iterable[Process]) -> None:
    """Sends a signal to each process that still exists and that this user may signal."""
    for process in targets:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(process.pid, number)


def adopt_orphans() -> None:
    """Makes this process the parent of all orphaned descendants, so that `descendants` finds them."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Makes this process receive a signal when its parent ends. Requires Linux: prctl(2)."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def end_descendants(grace_s: float, without: Callable[[], Collection[int]] = tuple) -> list[str]:
    """Kills the descendants that remain after `grace_s`, and returns their command lines.

    `without` returns the processes to omit, as in `descendants`.
    """
    end_s = time.monotonic() + grace_s
    while descendants(os.getpid(), without=without()) and time.monotonic() < end_s:
        time.sleep(0.02)
    command_lines: dict[int, str] = {}
    # The loop repeats because processes can start new ones, and is limited because a process can be
    # unkillable.
    end_s = time.monotonic() + _KILL_S
    while (left := descendants(os.getpid(), without=without())) and time.monotonic() < end_s:
        for process in left:
            with suppress(OSError):
                line = Path(f"/proc/{process.pid}/cmdline").read_text(errors="replace")
                if line:  # the line is empty if the process is already ending
                    command_lines.setdefault(process.pid, line.replace("\0", " ").strip())
        send(signal.SIGKILL, left)
        time.sleep(0.01)
    return list(command_lines.values())


def reap() -> None:
    """Reaps all dead children, adopted ones included. Their exit codes are lost."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def reap_of(pids: Iterable[int]) -> None:
    """Reaps those of these processes that are dead children."""
    for pid in pids:
        with suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def is_running(pid: int) -> bool:
    """Returns whether a process with this id exists and is not a zombie, which nobody may ever reap."""
    return process_stat(pid)[:1] not in ([], ["Z"], ["X"])
