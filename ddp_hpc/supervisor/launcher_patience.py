"""Decides how long the supervisor waits for a launcher that does not end.

srun waits forever for the tasks of a disconnected node, and MPICH's mpiexec for ranks whose proxy was killed.
mpiexec.hydra also stops forwarding signals and output as long as a stranger keeps a connection to its port.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Action = Literal["wait", "terminate", "kill"]

# The ranks close their process group and their files after they have written the final state.
FINAL_S = 30.0
_TERM_S = 5.0


@dataclass(frozen=True, kw_only=True)
class LauncherView:
    """What the supervisor knows about a running launcher; times are in seconds since the Unix epoch.

    `final_since_s` is when the run has written its final state, and `terminated_s` when the launcher was sent
    SIGTERM because of that; None if this has not happened. `last_s` is the last moment at which the launcher
    can be ended so that another job can still be requested; None if there is no limit.
    """

    now_s: float
    final_since_s: float | None = None
    terminated_s: float | None = None
    last_s: float | None = None


def next_action(view: LauncherView) -> Action:
    """Returns what to do with the launcher now."""
    if view.last_s is not None and view.now_s >= view.last_s:
        return "kill"
    if view.terminated_s is not None:
        return "kill" if view.now_s >= view.terminated_s + _TERM_S else "wait"
    if view.final_since_s is None:
        return "wait"
    terminate_s = view.final_since_s + FINAL_S
    if view.last_s is not None:
        terminate_s = min(terminate_s, max(view.final_since_s, view.last_s - _TERM_S))
    return "terminate" if view.now_s >= terminate_s else "wait"
