"""Work in a forked child that is given up after a time: neither a hung file system nor a crash reaches us."""

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
    """A running child: its answer comes through the pipe, whatever else it or its libraries print is kept."""

    pid: int
    answer: int
    words: int
    deadline_s: float
    limit_s: float


@dataclass(frozen=True)
class Gone:
    """A child that gave no answer, and why: `no answer within 20 s`, `ended by SIGSEGV (last words)`."""

    why: str


def start(work: Callable[[], Any], limit_s: float) -> Child:
    """Begins `work` in a child with a process group of its own. The parent must have one thread only."""
    reader, writer = os.pipe()
    words = os.memfd_create("words")  # no file system is asked for it
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.setpgid(0, 0)
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            signal.alarm(int(limit_s) + 5)  # should the parent be killed
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(words, 1)
            os.dup2(words, 2)
            os.close(reader)
            answer = pickle.dumps(work())
            with os.fdopen(writer, "wb") as pipe:
                pipe.write(answer)
            code = 0
        except BaseException as error:  # whatever a broken library raises is an answer too
            os.write(words, f"\n{type(error).__name__}: {error}"[:2000].encode("utf-8", "replace"))
        finally:
            os._exit(code)
    os.close(writer)
    with contextlib.suppress(OSError):  # both do it: whichever comes first, the group is there to be killed
        os.setpgid(pid, pid)
    return Child(pid, reader, words, time.monotonic() + limit_s, limit_s)


def collect(child: Child) -> Any:
    """What the child's work returned, or `Gone`. Returns within the child's time and a second."""
    try:
        content = bytearray()
        while True:
            left_s = max(0.0, child.deadline_s - time.monotonic())
            if not select.select([child.answer], [], [], left_s)[0]:
                return Gone(f"no answer within {child.limit_s:g} s")
            piece = os.read(child.answer, 1 << 16)
            if not piece:
                break
            content += piece
        ended = _exit_code(child.pid)
        if ended == 0 and content:
            return pickle.loads(content)  # noqa: S301 - from our own child
        how = f"ended by {signal.Signals(-ended).name}" if ended is not None and ended < 0 else "ended"
        return Gone(f"{how} ({_last_words(child.words)})")
    finally:
        _kill(child)
        os.close(child.answer)
        os.close(child.words)


def stop(children: Iterable[Child]) -> None:
    """Kills what is still running."""
    for child in children:
        _kill(child)


def _kill(child: Child) -> None:
    # The group is gone where the child has been waited for and left nothing behind.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    # A process in an uninterruptible wait does not end: it is not waited for.
    with contextlib.suppress(ChildProcessError):
        os.waitpid(child.pid, os.WNOHANG)


def _exit_code(pid: int) -> int | None:
    end = time.monotonic() + _EXIT_LIMIT_S
    while time.monotonic() < end:
        try:
            done, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:  # stopped and waited for already
            return None
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    return None


def _last_words(words: int) -> str:
    size = os.fstat(words).st_size
    text = os.pread(words, 4096, max(0, size - 4096)).decode("utf-8", "replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it said nothing"
