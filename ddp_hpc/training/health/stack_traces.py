"""Collects the stack traces of all threads of this process."""

from __future__ import annotations

import sys
import sysconfig
import threading
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

_MAX_CHARS = 60_000
_FOREIGN = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))


@dataclass(frozen=True)
class Stack:
    """The stacks of all threads in `text`, and the main thread's file, line and function in `where`."""

    where: str
    text: str


def stack_of_this_process() -> Stack:
    """Returns the Python stacks of all threads except the caller's, the main thread first.

    For a thread in C code, such as a collective or a read, the last line is the Python line that called it.
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


def _where(innermost: FrameType) -> str:
    """Returns the innermost line of a stack, and the innermost line outside of libraries if that is a
    different line.
    """
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
    """Returns a thread's state on Linux, such as `, D (disk sleep)` if a file system or driver blocks it."""
    try:
        status = Path(f"/proc/self/task/{thread_id}/status").read_text(encoding="utf-8")
    except OSError:
        return ""
    return next((f", {line[6:].strip()}" for line in status.splitlines() if line.startswith("State:")), "")
