"""Watches a run while its launcher runs: its final state, the deadline, and the signal before it.

srun waits forever for the tasks of a disconnected node, and MPICH's mpiexec for ranks whose proxy was killed.
mpiexec.hydra also stops forwarding signals and output as long as a stranger keeps a connection to its port.
The watch therefore ends a launcher that does not end.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ddp_hpc.queue.submission_ledger import Attempt
from ddp_hpc.supervisor.job_clock import JobClock
from ddp_hpc.supervisor.launcher_process import Action
from ddp_hpc.supervisor.run_files import RunFiles, SeenState

# How often the state of the run is read, which can be on a busy file system.
_READ_S = 2.0
# The time in which ranks without a launcher can save their state.
_ORPHANS_S = 10.0
# The ranks close their process group and their files after they have written the final state.
FINAL_S = 30.0
_TERM_S = 5.0
# Without a node, ranks can no longer save their state, and srun waits for this node, as does the process that
# srun leaves behind when it is killed.
_TERM_WITHOUT_NODE_S = 2.0


def next_action(
    now_s: float,
    final_since_s: float | None,
    terminated_s: float | None,
    last_s: float | None,
    term_s: float = _TERM_S,
) -> Action:
    """Returns what to do with the launcher now; times are in seconds since the Unix epoch.

    `final_since_s` is when the run has written its final state, and `terminated_s` when the launcher was sent
    SIGTERM because of that or of a failure; None if this has not happened. It has `term_s` to exit. `last_s`
    is the last moment at which the launcher can be ended so that another job can still be requested; None if
    there is no limit.
    """
    if last_s is not None and now_s >= last_s:
        return "kill"
    if terminated_s is not None:
        return "kill" if now_s >= terminated_s + term_s else "wait"
    if final_since_s is None:
        return "wait"
    terminate_s = final_since_s + FINAL_S
    if last_s is not None:
        terminate_s = min(terminate_s, max(final_since_s, last_s - _TERM_S))
    return "terminate" if now_s >= terminate_s else "wait"


class RunWatch:
    """The watch for one attempt; see `LauncherWatch`.

    Args:
        clock: the end of the job.
        launcher: the name of the launcher, for messages.
        forwards_term: see `LauncherWatch`.
        files: the files of the run; None if the run is not resumed, so that only signals are forwarded.
        attempt: this attempt; None without `files`.
        begin_limit_s: the time in which ranks must begin; None without a limit.
        find_lost_nodes: returns the nodes of the ranks that no longer answer.
        find_hang: returns why the ranks hang; empty if they do not.
        final_states: the states after which the launcher should end.
        signal_name: the signal that the ranks receive `signal_lead_s` before the end of the job.
        signal_lead_s: None if no signal is sent.
        say: prints a line to the job's log.
    """

    def __init__(
        self,
        clock: JobClock,
        launcher: str,
        *,
        forwards_term: str,
        files: RunFiles | None,
        attempt: Attempt | None,
        begin_limit_s: float | None,
        find_lost_nodes: Callable[[], list[str]],
        find_hang: Callable[[], str],
        final_states: tuple[str, ...],
        signal_name: str,
        signal_lead_s: float | None,
        say: Callable[[str], None],
    ) -> None:
        self.forwards_term = forwards_term
        self._clock, self._launcher, self._files, self._say = clock, launcher, files, say
        self._final_states = final_states
        self._signal_name, self._signal_lead_s = signal_name, signal_lead_s
        self._attempt, self._begin_limit_s = attempt, begin_limit_s
        self._find_lost_nodes, self._find_hang = find_lost_nodes, find_hang
        self.lost_nodes: tuple[str, ...] = ()
        """The nodes because of which the launcher was ended."""
        self.has_hung = False
        """Whether the launcher was ended because of a hang."""
        self._started_s = time.time()
        self.began_after_s: float | None = None
        """The time until ranks were seen to have begun; None if they were not."""
        self._initial = files.state() if files is not None else SeenState()
        self._read_s = 0.0
        self._final_since_s: float | None = None
        self._terminated_s: float | None = None

    def on_stop(self) -> None:
        """Asks the scheduler why SIGTERM was sent."""
        self._clock.stop()

    def early_signal(self) -> str:
        """Returns the signal of --requeue on-signal when it is due; empty at all other times."""
        if not self._is_signal_due():
            return ""
        self._clock.ask_again()
        if not self._is_signal_due():
            return ""
        self._signal_lead_s = None
        return self._signal_name

    def action(self) -> Action:
        """Returns whether to end the launcher, and prints the reason."""
        now_s = time.time()
        if self._files is None:
            return "wait"
        if now_s >= self._read_s + _READ_S:
            self._read_s = now_s
            self._read_state(self._files, now_s)
        if self._terminated_s is None and (reason := self._reason_to_give_up(now_s)):
            self._terminated_s = now_s
            self._say(f"ddp-hpc: terminating {self._launcher}: {reason}")
            return "terminate"
        term_s = _TERM_WITHOUT_NODE_S if self.lost_nodes else _TERM_S
        action = next_action(now_s, self._final_since_s, self._terminated_s, self._last_s(), term_s)
        if action == "terminate":
            self._terminated_s = now_s
            waited_s = now_s - (self._final_since_s or now_s)
            self._say(
                f"ddp-hpc: terminating {self._launcher}: it is still waiting for ranks {waited_s:.0f} s "
                "after the run wrote its final state"
            )
        elif action == "kill":
            why = "did not exit after SIGTERM"
            if self._terminated_s is None:
                why = "is still running shortly before the scheduler would kill it"
            self._say(f"ddp-hpc: killing {self._launcher}, which {why}")
        return action

    def orphans_s(self) -> float:
        """Returns the time in which ranks can save their state after their launcher has ended."""
        if self.lost_nodes:
            return _TERM_WITHOUT_NODE_S
        return max(0.0, self._clock.left_s(_ORPHANS_S + self._clock.reserve_s) - self._clock.reserve_s)

    def _last_s(self) -> float | None:
        """Returns when the launcher must be ended in order to request another job; None without a limit.

        Before SIGTERM or the final state, there is no limit, because a site can let jobs run on after the end
        of their walltime, and because the walltime can be extended.
        """
        clock = self._clock
        is_ending = self._final_since_s is not None or clock.stopped_s is not None
        if clock.kill_s is None or not is_ending or not clock.may_resume():
            return None
        return clock.kill_s - clock.reserve_s

    def _is_signal_due(self) -> bool:
        end_s, lead_s = self._clock.end_s, self._signal_lead_s
        return end_s is not None and lead_s is not None and time.time() >= end_s - lead_s

    def _reason_to_give_up(self, now_s: float) -> str:
        if lost := self._find_lost_nodes():
            self.lost_nodes = tuple(lost)
            return f"no answer from {', '.join(lost)}"
        if hang := self._find_hang():
            self.has_hung = True
            return hang
        limit_s = self._begin_limit_s
        is_late = limit_s is not None and self.began_after_s is None and now_s > self._started_s + limit_s
        return f"no rank has reported its start within {limit_s:.0f} s" if is_late else ""

    def _read_state(self, files: RunFiles, now_s: float) -> None:
        state = files.state()
        attempt = self._attempt if self.began_after_s is None else None
        if attempt is not None and files.has_begun(attempt, self._initial, state):
            self.began_after_s = now_s - self._started_s
        if state.stamp == self._initial.stamp or state.state not in self._final_states:
            self._final_since_s = None
        elif self._final_since_s is None:
            self._final_since_s = now_s
