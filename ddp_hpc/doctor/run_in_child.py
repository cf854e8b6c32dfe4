"""Runs functions in forked child processes with a time limit, to survive hangs and crashes."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

_EXIT_LIMIT_S = 1.0


@dataclass(frozen=True)
class Child:
    """A running child. `answer` is the pipe for its result, and `output` a file with all that it prints."""

    pid: int
    answer: int
    output: int
    deadline_s: float
    limit_s: float


@dataclass(frozen=True)
class NoAnswer:
    """The reason for a missing result: `no answer within 20 s`, `killed by SIGSEGV (last output line)`."""

    reason: str


def start(work: Callable[[], Any], limit_s: float) -> Child:
    """Starts `work` in a child with its own process group. The parent must be single-threaded."""
    reader, writer = os.pipe()
    output = os.memfd_create("output")  # in memory, so that no file system is accessed
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.setpgid(0, 0)
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            signal.alarm(int(limit_s) + 5)  # ends this child if its parent is killed
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
    return Child(pid, reader, output, time.monotonic() + limit_s, limit_s)


def collect(child: Child) -> Any:
    """Returns the result of the child or `NoAnswer`; waits at most one second longer than its limit."""
    try:
        content = bytearray()
        while True:
            left_s = max(0.0, child.deadline_s - time.monotonic())
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
