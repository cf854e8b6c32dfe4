"""The states of a run and the causes of its end, each in a table.

The trainer, the library, `ddp-hpc exec`, the supervisor and `ddp-hpc status` all follow these tables. To add
a state or a cause, add a member and a row: see CONTRIBUTING.md.
"""

from __future__ import annotations

import os
from enum import StrEnum
from typing import Literal, NamedTuple

_End = Literal["success", "stop", "failure"]
_Resumer = Literal["next job", "requeued job", "user"]


class State(StrEnum):
    """The first word in the file `state`. docs/explanation/snapshots-and-requeue.md has a table of them."""

    RUNNING = "running"
    """An attempt has begun. If no process is left, its ranks were lost before they could report a reason."""
    REQUEUE = "requeue"
    """The attempt has ended, its state is saved, and another job resumes the run."""
    DONE = "done"
    """The training, or the program, is complete."""
    FAILED = "failed"
    """The attempt has ended with an error, and no job resumes the run by itself."""

    @classmethod
    def ending_in(cls, *ends: _End) -> tuple[State, ...]:
        """Returns the states of attempts that have ended in one of these ways."""
        return tuple(state for state in cls if _STATES[state].ends_in in ends)

    @property
    def is_final(self) -> bool:
        """Whether the attempt that wrote this state has ended."""
        return _STATES[self].ends_in is not None

    @property
    def is_failure(self) -> bool:
        """Whether no job resumes the run until a user has found the cause."""
        return _STATES[self].ends_in == "failure"

    @property
    def is_stopped(self) -> bool:
        """Whether the run was stopped on purpose before it was complete, with its state saved."""
        return _STATES[self].ends_in == "stop"

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to do, so that the run is not resumed."""
        return _STATES[self].ends_in == "success"

    @property
    def is_resumed_by_job(self) -> bool:
        """Whether the next job resumes the run by itself. If not, a user can resume it."""
        return _STATES[self].resumed_by == "next job"

    @property
    def is_resumed_after_requeue(self) -> bool:
        """Whether the same job resumes the run if the scheduler or a user requeues it."""
        return _STATES[self].resumed_by != "user"

    def how_to_resume(self, action: str = "submit the script again") -> str:
        """Returns what a user must do so that the run is resumed; `action` is the last step."""
        before = _STATES[self].before_resuming or ("fix the cause" if self.is_failure else "")
        return f"{before}, then {action}" if before else action

    def advice_with(self, of_cause: str) -> str:
        """Returns what `ddp-hpc status` advises after this end; `of_cause` is the advice about the cause."""
        before = _STATES[self].before_resuming
        return f"{before}; {of_cause}" if before and before not in of_cause else of_cause

    @property
    def exit_code(self) -> int:
        """The exit code of `ddp-hpc status` for a run in this state, and of a job that ends with its state
        saved or complete.
        """
        return _STATES[self].exit_code

    def may_become(self, later: State, *, in_same_attempt: bool) -> bool:
        """Returns whether `later` may replace this state, in the attempt that wrote it or in a later one."""
        if in_same_attempt:
            # An attempt ends once: the first final state counts, even if something fails afterwards.
            return not self.is_final
        # An attempt that fails before it begins leaves a complete run complete.
        return later is State.RUNNING or (not self.is_complete and (later.is_stopped or later.is_failure))


class _StateRow(NamedTuple):
    """What follows from a state; see the properties of `State`."""

    exit_code: int
    ends_in: _End | None
    """How the attempt that wrote the state has ended; None if it has not ended."""
    resumed_by: _Resumer = "user"
    """The job that resumes the run by itself. With "user", a job that is requeued does nothing, either."""
    before_resuming: str = ""
    """What a user must do first, if the run is not resumed by a job; empty if nothing, or if the cause of a
    failure says it.
    """


_STATES = {
    # The supervisor resumes it only after a snapshot.
    State.RUNNING: _StateRow(exit_code=0, ends_in=None, resumed_by="next job"),
    State.REQUEUE: _StateRow(exit_code=75, ends_in="stop", resumed_by="next job"),
    State.DONE: _StateRow(exit_code=0, ends_in="success"),
    # The requeue was requested, and the failure may have been caused by a lost node.
    State.FAILED: _StateRow(exit_code=1, ends_in="failure", resumed_by="requeued job"),
}


class Cause(StrEnum):
    """Why an attempt ended."""

    DONE = "done"
    STOPPED = "stopped"
    """It has saved its state and stopped on purpose, for example before the end of the walltime."""
    FAILED = "failed"
    """An error of the program, its data or its machine."""
    EXITED = "exited"
    """The program of a rank exited with an error code, and recorded no reason."""
    LOST_RANK = "lost rank"
    """A rank was killed, or its node does not answer."""
    HANG = "hang"
    """A rank has made no progress for too long."""
    OUT_OF_TIME = "out of time"
    """A rank did not stop in time, and ended itself shortly before the scheduler would have killed it."""
    OUT_OF_MEMORY = "out of memory"
    """A rank could not allocate memory, on its GPU or its host."""
    REFUSED = "refused"
    """The request is wrong, and the attempt has not begun."""
    SIGNALLED = "signalled"
    """A signal ended it before it could save its state."""
    INTERRUPTED = "interrupted"
    """Ctrl-C."""

    @property
    def exit_code(self) -> int:
        """The exit code of the ranks and of the job, unless the program has set another one."""
        return _CONSEQUENCES[self].exit_code

    @property
    def advice(self) -> str:
        """What `ddp-hpc status` advises; empty if the scheduler's reason says more."""
        row = _CONSEQUENCES[self]
        if row.state is not None and row.state.is_stopped:
            return row.state.how_to_resume()
        return row.advice

    @property
    def is_failure(self) -> bool:
        """Whether the attempt has failed, even if another job resumes the run."""
        state = _CONSEQUENCES[self].state
        return state is not None and state.is_failure

    @property
    def is_vague(self) -> bool:
        """Whether the log of the job or the first error can show a cause that says more."""
        return _CONSEQUENCES[self].is_vague

    @property
    def may_resume(self) -> bool:
        """Whether another job resumes the run if this attempt has saved a snapshot."""
        return _CONSEQUENCES[self].resumes

    @property
    def may_restart(self) -> bool:
        """Whether the supervisor starts the ranks again in the same job, from the newest snapshot."""
        return _CONSEQUENCES[self].restarts

    def state_of_run(self, *, has_progressed: bool) -> State | None:
        """Returns the state of the run after an attempt that has ended for this cause; None: unchanged.

        `has_progressed` is whether the attempt has saved a snapshot.
        """
        row = _CONSEQUENCES[self]
        return State.REQUEUE if row.resumes and has_progressed else row.state


class Stop(NamedTuple):
    """Why an attempt ends on purpose: the cause of its end, and the reason in one line."""

    cause: Cause
    reason: str

    @property
    def state(self) -> State:
        """The state of the run after the stop."""
        state = self.cause.state_of_run(has_progressed=True)
        assert state is not None
        return state

    def line(self, saved: str, at: str = "") -> str:
        """Returns the line about a run that stops early; `saved` is what was saved.

        In a batch job, the supervisor then says how the run is resumed.
        """
        text = f"Stopping{at}: {self.reason}. {saved}"
        if os.environ.get("DDP_HPC_THIS_ATTEMPT"):
            return f"{text}."
        return f"{text}; {self.state.how_to_resume('run the same command again to resume')}."


class _Consequence(NamedTuple):
    """What follows from a cause; see the properties of `Cause`. `state` is None if it does not change."""

    exit_code: int
    state: State | None
    resumes: bool = False
    restarts: bool = False
    advice: str = ""
    is_vague: bool = False


_FIX_ERROR = "fix the error shown above, then submit it again"
_CONSEQUENCES = {
    Cause.DONE: _Consequence(exit_code=0, state=State.DONE, is_vague=True),
    Cause.STOPPED: _Consequence(exit_code=75, state=State.REQUEUE, resumes=True, is_vague=True),
    Cause.FAILED: _Consequence(
        exit_code=1, state=State.FAILED, restarts=True, advice=_FIX_ERROR, is_vague=True
    ),
    Cause.EXITED: _Consequence(
        exit_code=1, state=State.FAILED, resumes=True, restarts=True, advice=_FIX_ERROR, is_vague=True
    ),
    Cause.LOST_RANK: _Consequence(
        exit_code=1,
        state=State.FAILED,
        resumes=True,
        restarts=True,
        advice="submit it again; if the same node fails again, exclude it and report it to the site",
        is_vague=True,
    ),
    Cause.HANG: _Consequence(
        exit_code=1,
        state=State.FAILED,
        resumes=True,
        restarts=True,
        advice="find the line that hangs in the stack traces; if it was only slow, raise --hang-timeout "
        "(of ddp_hpc.train) or --idle-timeout",
    ),
    Cause.OUT_OF_TIME: _Consequence(
        exit_code=1,
        state=State.FAILED,
        resumes=True,
        advice="increase --walltime, or save snapshots more often",
    ),
    # Another attempt would need the same memory, so no job resumes the run.
    Cause.OUT_OF_MEMORY: _Consequence(
        exit_code=78,
        state=State.FAILED,
        advice="lower --batch-size, or halve it and double --accumulate; then submit it again",
    ),
    Cause.REFUSED: _Consequence(
        exit_code=2, state=None, advice="correct the request, then submit it again", is_vague=True
    ),
    Cause.SIGNALLED: _Consequence(exit_code=143, state=None, resumes=True, is_vague=True),
    Cause.INTERRUPTED: _Consequence(exit_code=130, state=None),
}
COMPLETE = Stop(Cause.DONE, "training complete")
REQUESTED = Stop(Cause.STOPPED, "the program requested it")
