"""Waits until gloo's threads have finished a collective, which happens after its callers have continued.

gloo first completes the future of a collective, and DDP waits only for that. Afterwards gloo's thread ends
the profiler's event and frees the work (ProcessGroupGloo.cpp of torch 2.13, finishWorkGloo and runLoop).

- If the profiler is stopped in between, it frees the record of the event, and the thread writes to freed
  memory: the process crashes later, or hangs.
- Freeing the work needs the GIL. If DDP's reducer holds the last reference to the process group, freeing the
  reducer holds the GIL and waits for the thread: a deadlock. The deadlock occurred in about one of twenty
  processes that created several process groups on a busy machine.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

import torch

_NAME = "pt_gloo_runloop"
_FIRST_WITH_NAMES = (2, 11)  # torch 2.8 does not name gloo's threads; 2.9 and 2.10 were not tried
_IDLE_S = 0.005
_LIMIT_S = 5.0


def wait_for_gloo() -> None:
    """Returns when each of gloo's threads has been sleeping for some milliseconds.

    Returns immediately if there is no such thread. A thread that is waiting in a collective looks like an
    idle thread, so the function does not wait for it.
    """
    end_s = time.monotonic() + _LIMIT_S
    waiting = _gloo_threads()
    while waiting and time.monotonic() < end_s:
        before = {thread: _context_switches(thread) for thread in waiting}
        time.sleep(_IDLE_S)
        waiting = [
            thread for thread in waiting if not before[thread] or _context_switches(thread) != before[thread]
        ]


def _gloo_threads() -> list[Path]:
    try:
        threads = list(Path("/proc/self/task").iterdir())
    except OSError:
        return []
    named = [thread for thread in threads if _text(thread / "comm").strip() == _NAME]
    if named or torch.__version__ >= _FIRST_WITH_NAMES:  # type: ignore[operator]  # it compares tuples, too
        return named
    # All threads that Python has not started, since nothing distinguishes those of gloo.
    own = {str(thread.native_id) for thread in threading.enumerate()}
    return [thread for thread in threads if thread.name not in own]


def _context_switches(thread: Path) -> str:
    """Returns the number of context switches of a sleeping thread; empty if the thread is running."""
    lines = _text(thread / "status").splitlines()
    if not lines:  # the thread has ended
        return "ended"
    if not any(line.startswith("State:\tS") for line in lines):
        return ""
    return " ".join(line for line in lines if "ctxt_switches" in line)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
