"""Where the code of this process is at the moment, told by one of its threads about the others."""

from __future__ import annotations

import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

_MAX_CHARS = 60_000
_FOREIGN = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))


@dataclass(frozen=True)
class Stack:
    """`where`: file, line and function of the main thread, for one line; `text`: all threads, for a file."""

    where: str
    text: str


def stack_of_this_process() -> Stack:
    """The Python stacks of all threads but the caller's, the main thread first.

    A thread in C code, in a collective or a read, shows the Python line that called it.
    """
    frames = sys._current_frames()
    main = threading.main_thread()
    others = [t for t in threading.enumerate() if t not in (main, threading.current_thread())]
    parts = []
    for thread in (main, *others):
        if thread.ident in frames:
            lines = traceback.format_stack(frames[thread.ident])
            parts.append(f"{thread.name}{_kernel_state(thread.native_id)}:\n{''.join(lines)}")
    frame = frames.get(main.ident or 0)
    return Stack(_where(frame) if frame is not None else "", "\n".join(parts)[:_MAX_CHARS])


def in_time(work: Callable[[], object], limit_s: float) -> bool:
    """Whether a writer was done in time. The file system may be what hangs: nobody is to hang with it."""
    done = threading.Event()

    def run() -> None:
        with suppress(Exception):
            work()
            done.set()

    threading.Thread(target=run, name="writer of a diagnosis", daemon=True).start()
    return done.wait(limit_s)


def _where(innermost: FrameType) -> str:
    """The innermost line, and the innermost one outside of libraries where that is another."""
    frame: FrameType | None = innermost
    while frame is not None and _is_foreign(frame):
        frame = frame.f_back
    if frame is None or frame is innermost:
        return _line(innermost)
    return f"{_line(innermost)}, called by {_line(frame)}"


def _is_foreign(frame: FrameType) -> bool:
    path = frame.f_code.co_filename
    return "ddp_hpc" not in path and (path.startswith(_FOREIGN) or path.startswith("<"))


def _line(frame: FrameType) -> str:
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"


def _kernel_state(thread_id: int | None) -> str:
    """`, D (disk sleep)`: a thread that hangs in a file system or a driver has state D. Linux."""
    try:
        status = Path(f"/proc/self/task/{thread_id}/status").read_text(encoding="utf-8")
    except OSError:
        return ""
    return next((f", {line[6:].strip()}" for line in status.splitlines() if line.startswith("State:")), "")
