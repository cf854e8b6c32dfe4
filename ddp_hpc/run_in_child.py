"""Runs functions in forked child processes with a time limit, to survive hangs and crashes."""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import select
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ddp_hpc.process_control import die_with_parent

_EXIT_LIMIT_S = 1.0


@dataclass(frozen=True)
class Child:
    """A running child. `answer` is the pipe for its result, and `output` a file with all that it prints."""

    pid: int
    answer: int
    output: int
    deadline_s: float  # infinite if there is no limit
    limit_s: float | None


@dataclass(frozen=True)
class NoAnswer:
    """The reason for a missing result: `no answer within 20 s`, `killed by SIGSEGV (last output line)`."""

    reason: str

    @property
    def how(self) -> str:
        """The reason without the last line of output of a process that was killed."""
        return self.reason.partition(" (")[0] if self.reason.startswith("killed") else self.reason


def start(work: Callable[[], Any], limit_s: float | None) -> Child:
    """Starts `work` in a child with its own process group; it ends with the thread that called this function.

    No other thread of the parent may hold a lock that `work` needs. `limit_s` is None for no time limit.
    """
    reader, writer = os.pipe()
    output = os.memfd_create("output")  # in memory, so that no file system is accessed
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.setpgid(0, 0)
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            die_with_parent(signal.SIGKILL)
            if limit_s is not None:
                signal.alarm(int(limit_s) + 5)  # if the parent was killed before the previous line
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.close(reader)
            answer = pickle.dumps(work())
            with os.fdopen(writer, "wb") as pipe:
                pipe.write(answer)
            code = 0
        except BaseException as error:  # a broken library may raise anything
            os.write(output, f"\n{type(error).__name__}: {error}"[:2000].encode("utf-8", "replace"))
        finally:
            os._exit(code)
    os.close(writer)
    # Parent and child both call setpgid, so that the group exists before either of them continues.
    with contextlib.suppress(OSError):
        os.setpgid(pid, pid)
    deadline_s = math.inf if limit_s is None else time.monotonic() + limit_s
    return Child(pid, reader, output, deadline_s, limit_s)


def collect(child: Child) -> Any:
    """Returns the result of the child or `NoAnswer`; waits at most one second longer than its limit."""
    try:
        content = bytearray()
        while True:
            left_s = None if child.limit_s is None else max(0.0, child.deadline_s - time.monotonic())
            if not select.select([child.answer], [], [], left_s)[0]:
                return NoAnswer(f"no answer within {child.limit_s:g} s")
            piece = os.read(child.answer, 1 << 16)
            if not piece:
                break
            content += piece
        code = _exit_code(child.pid)
        if code == 0 and content:
            return pickle.loads(content)  # noqa: S301 - the data comes from our own child
        how = f"killed by {signal.Signals(-code).name}" if code is not None and code < 0 else "failed"
        return NoAnswer(f"{how} ({_last_line(child.output)})")
    finally:
        _kill(child)
        os.close(child.answer)
        os.close(child.output)


def stop(children: Iterable[Child]) -> None:
    """Kills the children that are still running."""
    for child in children:
        _kill(child)


def _kill(child: Child) -> None:
    # The group no longer exists if the child has been reaped and has left no processes.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    # WNOHANG, since a process in an uninterruptible wait might never end.
    with contextlib.suppress(ChildProcessError):
        os.waitpid(child.pid, os.WNOHANG)


def _exit_code(pid: int) -> int | None:
    end = time.monotonic() + _EXIT_LIMIT_S
    while time.monotonic() < end:
        try:
            done, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:  # the child was already stopped and reaped
            return None
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    return None


def _last_line(output: int) -> str:
    size = os.fstat(output).st_size
    text = os.pread(output, 4096, max(0, size - 4096)).decode("utf-8", "replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no output"
