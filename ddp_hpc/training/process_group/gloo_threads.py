"""Waiting until gloo's threads are done with a collective, which is later than its callers take it for done.

gloo completes a collective's future first; DDP waits for that alone. Only then does gloo's thread end the
profiler's event and free the work (ProcessGroupGloo.cpp, AsyncWork::finishWorkGloo and runLoop, torch 2.13).

- A profiler that is stopped in between has freed the event's record, and the thread writes to freed memory:
  processes crashed later, or hung.
- Freeing the work takes Python's lock. DDP's reducer, when it is freed as the last that knows the process
  group, holds that lock and waits for the thread's end: a deadlock, which about one process in twenty met
  that went through several worlds on a busy machine.
"""

from __future__ import annotations

import time
from pathlib import Path

_NAME = "pt_gloo_runloop"
_IDLE_S = 0.005
_LIMIT_S = 5.0


def wait_for_gloo() -> None:
    """Returns once each of gloo's threads has slept for some milliseconds without a break.

    Returns at once where there is none. A collective that is still in flight looks the same as an idle
    thread, and is not waited for.
    """
    end_s = time.monotonic() + _LIMIT_S
    waiting = _gloo_threads()
    while waiting and time.monotonic() < end_s:
        before = {thread: _sleeps(thread) for thread in waiting}
        time.sleep(_IDLE_S)
        waiting = [thread for thread in waiting if not before[thread] or _sleeps(thread) != before[thread]]


def _gloo_threads() -> list[Path]:
    try:
        threads = list(Path("/proc/self/task").iterdir())
    except OSError:
        return []
    return [thread for thread in threads if _text(thread / "comm").strip() == _NAME]


def _sleeps(thread: Path) -> str:
    """How often the thread has given up or lost its core, if it sleeps now; empty where it runs."""
    lines = _text(thread / "status").splitlines()
    if not lines:  # it has ended
        return "ended"
    if not any(line.startswith("State:\tS") for line in lines):
        return ""
    return " ".join(line for line in lines if "ctxt_switches" in line)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
