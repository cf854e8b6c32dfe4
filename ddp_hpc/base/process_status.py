"""Reads from /proc whether a process still exists, and when it started."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

_EXITING = 0x4  # PF_EXITING of Linux's sched.h, in the flags of /proc/PID/stat


def process_started(pid: int) -> str:
    """Returns the start time of a process, which distinguishes it from a later one with the same id.

    It is empty if the process has ended. A process that has received SIGKILL counts as ended: it no longer
    writes anything, although its ID exists until its memory has been freed and its parent has waited for it.
    """
    fields = process_stat(pid)
    if not fields or _is_killed(pid):
        return ""
    return fields[19]


def process_start_s(pid: int) -> float | None:
    """Returns the start of a process in seconds since the Unix epoch; None if it is unknown."""
    try:
        uptime_s = float(Path("/proc/uptime").read_text().split()[0])
        return time.time() - (uptime_s - int(process_stat(pid)[19]) / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return None


def process_stat(pid: int) -> list[str]:
    """Returns the fields of /proc/PID/stat that follow the program's name, the first of which is the state.

    See proc(5). The list is empty on an error.
    """
    try:
        return _stat_fields(Path(f"/proc/{pid}"))
    except OSError:
        return []


def _stat_fields(directory: Path) -> list[str]:
    return (directory / "stat").read_text().rpartition(")")[2].split()


def _is_killed(pid: int) -> bool:
    """Returns whether the process has ended, or is ending and no longer executes its program."""
    try:
        return all(_is_ending(thread) for thread in Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return True


def _is_ending(thread: Path) -> bool:
    """Returns whether this thread has ended or no longer executes its program.

    `thread` is its directory in /proc/PID/task. When a process exits or is killed, Linux sends SIGKILL to
    each of its threads. On a busy machine, the first one can end long before the others are scheduled.
    """
    try:
        status = (thread / "status").read_text()
        fields = _stat_fields(thread)
    except OSError:
        return True
    pending = [int(mask, 16) for mask in re.findall(r"^S(?:ig|hd)Pnd:\s*(\S+)$", status, re.MULTILINE)]
    has_sigkill = any(mask >> (signal.SIGKILL - 1) & 1 for mask in pending)
    return has_sigkill or fields[0] in "ZX" or bool(int(fields[6]) & _EXITING)


def is_gone(pid: int, started: str | None) -> bool:
    """Returns whether the process of this host with this id and start time has ended.

    `started` is the result of `process_started`; with None, any process with this id counts as the same one.
    """
    if now := process_started(pid):
        return started is not None and started != now
    return not _may_be_hidden(pid)


def _may_be_hidden(pid: int) -> bool:
    """Returns whether the process exists but belongs to another user: /proc may not show such processes."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (ProcessLookupError, OverflowError):
        return False
    # Without /proc, a process of this user cannot be examined further.
    return not Path("/proc/self/stat").exists()
