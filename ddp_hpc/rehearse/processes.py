"""Processes by /proc: whose child, of which session; signals to many; and none that outlives its job."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

# The directory that holds the package, for Pythons that start without their site-packages.
PACKAGES = Path(__file__).resolve().parents[2]

_KILL_S = 10.0
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


@dataclass(frozen=True)
class Process:
    """A line of /proc/PID/stat. Zombies are not counted as processes here."""

    pid: int
    parent: int
    session: int


def processes() -> list[Process]:
    """Every process of the machine."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, parent, _, session, *_ = path.read_text().rpartition(")")[2].split()
            if state not in "ZX":
                found.append(Process(int(path.parent.name), int(parent), int(session)))
    return found


def of_session(number: int) -> list[Process]:
    """The processes of one session."""
    return [process for process in processes() if process.session == number]


def descendants(*ancestors: int) -> list[Process]:
    """All children of these processes, and theirs, whatever session they moved to."""
    everything, family = processes(), set(ancestors)
    while more := {p.pid for p in everything if p.parent in family} - family:
        family |= more
    return [p for p in everything if p.pid in family and p.pid not in ancestors]


def send(number: int, targets: Iterable[Process]) -> None:
    """One signal to each that is still there."""
    for process in targets:
        with suppress(ProcessLookupError):
            os.kill(process.pid, number)


def adopt_orphans() -> None:
    """From now on orphans below this process become its children, so that none escapes `descendants`."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent() -> None:
    """For `preexec_fn`: SIGKILL for this process when the one that started it is gone."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def end_descendants(grace_s: float) -> list[str]:
    """Kills what is left below this process after `grace_s`; their command lines."""
    end_s = time.monotonic() + grace_s
    while descendants(os.getpid()) and time.monotonic() < end_s:
        time.sleep(0.02)
    words: dict[int, str] = {}
    # A child that is born meanwhile is found by the next look; one that no signal can end is not waited for.
    end_s = time.monotonic() + _KILL_S
    while (left := descendants(os.getpid())) and time.monotonic() < end_s:
        for process in left:
            with suppress(OSError):
                line = Path(f"/proc/{process.pid}/cmdline").read_text(errors="replace")
                words.setdefault(process.pid, line.replace("\0", " ").strip())
        send(signal.SIGKILL, left)
        time.sleep(0.01)
    return list(words.values())


def reap() -> None:
    """Takes leave of all dead children, adopted ones too: nobody may want their exit codes any more."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def is_running(pid: int) -> bool:
    """True where there is a process of that number."""
    return Path(f"/proc/{pid}").exists()
