"""How an attempt ended, and whether another start in the same job can help."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from ddp_hpc.base.attempt_end import AttemptEnd
from ddp_hpc.base.run_outcomes import Cause
from ddp_hpc.queue.submission_ledger import Attempt
from ddp_hpc.supervisor import decisions
from ddp_hpc.supervisor.launcher_process import LauncherEnd
from ddp_hpc.supervisor.run_files import SeenState

# Signals that a program causes by its own errors. SIGABRT is not one of them: NCCL aborts after an error of
# the network. SIGKILL comes from outside, such as from a node that runs out of memory.
_OWN_SIGNALS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
_STOPS: dict[decisions.SigtermCause, str] = {
    "walltime": "the walltime is about to end",
    "cancelled": "the job was cancelled",
    "preempted": "the job was preempted",
    "requeued": "the scheduler has requeued the job",
    "unknown": "the job received SIGTERM",
}
_FINAL = {
    Cause.OUT_OF_TIME: _STOPS["walltime"],
    Cause.OUT_OF_MEMORY: "the ranks would run out of memory again",
    Cause.SIGNALLED: "a signal from outside the job ended the ranks",
    Cause.INTERRUPTED: "SIGINT ended the ranks",
}
_NO_FAILURES = (Cause.DONE, Cause.STOPPED, Cause.REFUSED)


@dataclass(frozen=True, kw_only=True)
class EndedAttempt:
    """How an attempt ended, and what follows if it is the last one of this job."""

    attempt: Attempt
    launcher: LauncherEnd
    after: SeenState
    """The state of the run."""
    outcome: SeenState | int
    """The state that another job can resume, or the exit code of this job. A user can resume it after a
    `refusal`.
    """
    end: AttemptEnd | None = None
    """The record of the end; None without a record."""
    stop: decisions.SigtermCause = ""
    refusal: decisions.NoJob | None = None
    has_begun: bool = False
    """Whether ranks are known to have begun."""

    @property
    def has_failed(self) -> bool:
        """Whether the attempt has neither completed the run nor stopped on purpose."""
        after, end = self.after, self.end
        if after.state is not None and after.state.is_complete:
            return False
        if end is None:
            return after.state is not None and after.state.is_failure
        return self._lost_others or end.cause not in _NO_FAILURES

    @property
    def _lost_others(self) -> bool:
        """Whether ranks probably received SIGTERM because another one, or an agent of torchrun, was killed.

        A launcher that this process has killed says nothing about its ranks.
        """
        was_stopped = self.end is not None and self.end.cause in (Cause.STOPPED, Cause.OUT_OF_TIME)
        launcher = self.launcher
        return was_stopped and launcher.saw_sigkill and (not launcher.was_ended or bool(launcher.lost_nodes))

    @property
    def why_final(self) -> str:
        """Why no other start in this job can help after a failure; empty if one can."""
        launcher = self.launcher
        if self.stop:
            return _STOPS[self.stop]
        if launcher.was_signalled_early:
            return "the ranks had already received the signal of --requeue on-signal"
        if self.refusal is decisions.LAUNCHER_HUNG:
            return "the launcher had to be killed"
        if self.end is None or self._lost_others:
            return ""
        return _FINAL.get(self.end.cause, "")

    @property
    def may_restart(self) -> bool:
        """Whether the attempt has failed, and another start in this job can help."""
        return self.has_failed and not self.why_final

    @property
    def has_progressed(self) -> bool:
        """Whether the attempt has saved a snapshot."""
        return self.after.step > self.attempt.first_step or not self.after.is_step_known

    @property
    def was_lost(self) -> bool:
        """Whether ranks were lost before they saved a snapshot."""
        return self.end is not None and self.end.cause.may_resume and not self.has_progressed

    def has_begun_like(self, earlier: EndedAttempt | None) -> bool:
        """Returns whether the ranks have begun, as far as this is known of the earlier attempt."""
        return earlier is None or self.has_begun or not earlier.has_begun

    def repeats(self, earlier: EndedAttempt | None) -> bool:
        """Returns whether the program itself has ended both attempts at the same place: the same exception in
        the same step, or the same exit code after the same checkpoint.
        """
        if earlier is None or earlier.end is None or self.end is None or not self.has_begun_like(earlier):
            return False
        end, before = self.end, earlier.end
        is_own = end.cause in (Cause.FAILED, Cause.EXITED) or end.exit_code - 128 in _OWN_SIGNALS
        if self.launcher.saw_sigkill or not is_own or (end.step is None and self.has_progressed):
            return False
        return (end.exception, end.step, end.exit_code) == (before.exception, before.step, before.exit_code)

    def suspected_node(self, earlier: EndedAttempt | None) -> str:
        """Returns the host on which two attempts in a row have failed, the second one without progress; empty
        if there is none, or if the same exception in the same step shows that the program is the cause.
        """
        if earlier is None or earlier.end is None or self.end is None or self.has_progressed:
            return ""
        end, before = self.end, earlier.end
        is_exact = bool(end.exception) and end.step is not None and self.repeats(earlier)
        if is_exact or end.host != before.host or not (self.may_restart and end.cause.may_restart):
            return ""
        return end.host
