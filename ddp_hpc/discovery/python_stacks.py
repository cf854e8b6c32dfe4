"""The Python stacks of a running program, which is not changed and continues.

py-spy reads them if it is installed and the kernel permits it. Otherwise, faulthandler writes them: `Dumps`
makes Python register a signal when it starts. Both work while the program is blocked in C code.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ddp_hpc.base.process_control import Process, processes
from ddp_hpc.base.process_status import process_stat

_AT_PYTHON_START = Path(__file__).with_name("at_python_start")
_VARIABLE = "DDP_HPC_STACKS"
# A program is unlikely to use it. Real-time signals are not sent by terminals, kernels or schedulers.
_SIGNAL = signal.SIGRTMAX - 3
_DUMP_S, _PY_SPY_S, _POLL_S = 5.0, 20.0, 0.05
_FRAME = re.compile(r'\s*File "(.*)", line (\d+) in (.*)')
_CURRENT = "Current thread "


STOPPED = ("T", "t")
"""The states of a process that a signal or a debugger has stopped."""


def state_of(pid: int) -> str:
    """Returns the state of a process in /proc, such as `S`; empty if it has ended."""
    return (process_stat(pid) or [""])[0]


def num_waits(pid: int) -> int:
    """Returns how often the main thread of a process has waited: its voluntary context switches.

    A thread that waits for a GPU has none, because CUDA and HIP poll.
    """
    try:
        status = Path(f"/proc/{pid}/task/{pid}/status").read_text()
    except OSError:
        return 0
    found = re.search(r"^voluntary_ctxt_switches:\s*(\d+)", status, re.MULTILINE)
    return int(found[1]) if found else 0


class Frame(NamedTuple):
    """One line of a stack."""

    file: str
    line: int
    function: str


class Stacks(NamedTuple):
    """The stacks of all threads as text, and that of the main thread, innermost line first."""

    text: str
    main: tuple[Frame, ...]


class Family(NamedTuple):
    """A process and its descendants, parents first."""

    pids: tuple[int, ...]

    @classmethod
    def of(cls, pid: int) -> Family:
        """Returns the process and its descendants."""
        children: dict[int, list[Process]] = {}
        for process in processes():
            children.setdefault(process.parent, []).append(process)
        pids = [pid]
        for known in pids:
            pids.extend(process.pid for process in children.get(known, []))
        return cls(tuple(pids))

    def cpu_s(self) -> float:
        """Returns the CPU time of the processes, and of their children that have ended."""
        ticks = sum(sum(map(int, process_stat(pid)[11:15])) for pid in self.pids)
        return ticks / os.sysconf("SC_CLK_TCK")

    def python(self) -> int | None:
        """Returns the topmost Python process; None if there is none."""
        return next((pid for pid in self.pids if _is_python(pid)), None)


class Dumps:
    """A file in memory to which the program of a rank writes its stacks when it gets a signal."""

    def __init__(self) -> None:
        self._file = os.memfd_create("stacks", 0)  # the program inherits it

    def environ(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Returns the environment in which Python registers the signal."""
        path = os.pathsep.join(filter(None, (str(_AT_PYTHON_START), environ.get("PYTHONPATH", ""))))
        return {**environ, "PYTHONPATH": path, _VARIABLE: f"{_SIGNAL} {self._file}"}

    def stacks(self, family: Family) -> Stacks | None:
        """Returns the stacks of the topmost process that has registered the signal; None if there is none."""
        pid = next((pid for pid in family.pids if self._has_registered(pid)), None)
        if pid is None or state_of(pid) in STOPPED:
            return None
        os.lseek(self._file, 0, os.SEEK_SET)
        os.ftruncate(self._file, 0)
        os.kill(pid, _SIGNAL)
        end_s, text = time.monotonic() + _DUMP_S, ""
        while time.monotonic() < end_s:
            time.sleep(_POLL_S)
            before, text = text, self._read()
            if text and text == before:
                return Stacks(text, _main_thread_of(text))
        return None

    def _read(self) -> str:
        size = os.fstat(self._file).st_size
        return os.pread(self._file, size, 0).decode("utf-8", "replace")

    def _has_registered(self, pid: int) -> bool:
        """Returns whether the signal makes the process write to the file. It would end another process."""
        try:
            status = Path(f"/proc/{pid}/status").read_text()
            theirs, own = os.stat(f"/proc/{pid}/fd/{self._file}"), os.fstat(self._file)  # noqa: PTH116
        except OSError:
            return False
        caught = re.search(r"^SigCgt:\s*(\S+)", status, re.MULTILINE)
        is_caught = caught is not None and int(caught[1], 16) >> (_SIGNAL - 1) & 1 == 1
        return is_caught and (theirs.st_dev, theirs.st_ino) == (own.st_dev, own.st_ino)


def stacks_by_py_spy(family: Family, environ: Mapping[str, str]) -> Stacks | None:
    """Returns the stacks of the topmost Python process; None if py-spy is not installed or not permitted."""
    beside = str(Path(sys.executable).parent)
    program = shutil.which("py-spy", path=os.pathsep.join((environ.get("PATH", os.defpath), beside)))
    pid = family.python()
    if program is None or pid is None:
        return None
    with suppress(OSError, subprocess.TimeoutExpired, ValueError, KeyError, TypeError):
        # A running process must be paused to be read, but one that is stopped must not be resumed afterwards.
        options = ["--nonblocking"] if state_of(pid) in STOPPED else []
        ended = subprocess.run(
            [program, "dump", "--json", "--full-filenames", *options, "--pid", str(pid)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_PY_SPY_S,
            check=False,
        )
        threads = {
            thread["os_thread_id"]: (
                f"Thread {thread['os_thread_id']} {thread['thread_name'] or ''}",
                tuple(
                    Frame(frame["filename"], int(frame["line"]), frame["name"].rpartition(".")[2])
                    for frame in thread["frames"]
                ),
            )
            for thread in json.loads(ended.stdout)
        }
        main = threads.pop(pid)
        return Stacks("\n".join(_as_text(*thread) for thread in (main, *threads.values())), main[1])
    return None


def _as_text(title: str, frames: tuple[Frame, ...]) -> str:
    """Formats the stack of a thread in the way of faulthandler."""
    lines = [f'  File "{frame.file}", line {frame.line} in {frame.function}' for frame in frames]
    return "\n".join((f"{title} (most recent call first):", *lines, ""))


def _main_thread_of(dump: str) -> tuple[Frame, ...]:
    """Returns the stack of the thread that got the signal, which is the main one unless that blocks it."""
    _, is_known, rest = dump.partition(_CURRENT)
    block = (rest if is_known else dump.rpartition("Thread ")[2]).split("\n\n")[0]
    matches = (_FRAME.match(line) for line in block.splitlines())
    return tuple(Frame(match[1], int(match[2]), match[3]) for match in matches if match)


def _is_python(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/exe").readlink().name.startswith("python")
    except OSError:
        return False
