"""What the supervisor decides: how a program ended, why its job was stopped, and which job follows."""

from __future__ import annotations

import pytest

from ddp_hpc.base.attempt_end import AttemptEnd
from ddp_hpc.base.errors import DdpHpcError
from ddp_hpc.base.run_outcomes import _STATES, Cause, State
from ddp_hpc.queue.submission_ledger import Attempt
from ddp_hpc.schedulers.registry import SCHEDULERS
from ddp_hpc.schedulers.running_job import StopCause
from ddp_hpc.supervisor import decisions
from ddp_hpc.supervisor.decisions import program_end, why_no_job, why_stopped
from ddp_hpc.supervisor.launcher_process import Action
from ddp_hpc.supervisor.run_files import SeenState
from ddp_hpc.supervisor.run_watch import FINAL_S, next_action

ATTEMPT = Attempt(number=2, job_id="17", first_step=10, at_s=1700000000)
FAILED = AttemptEnd(cause=Cause.EXITED, exit_code=3, reason="rank 1 on n2 exited with code 3")
KILLED = AttemptEnd(cause=Cause.LOST_RANK, exit_code=137, reason="rank 1 on n2 was killed by SIGKILL")
TERMINATED = AttemptEnd(cause=Cause.LOST_RANK, exit_code=143, reason="rank 1 on n2 was killed by SIGTERM")
HANG = AttemptEnd(cause=Cause.HANG, exit_code=1, reason="rank 1 hangs")
ERROR = AttemptEnd(cause=Cause.FAILED, exit_code=31, reason="an error")
LOOK = "look for the cause in the log"
WITHOUT_STATE = "mpiexec exited with code 0, but the training has not written its final state"
KILLED_LAUNCHER = "mpiexec did not end and was killed; look in the log for ranks that hang"


def end_of(**given: object) -> AttemptEnd:
    defaults: dict[str, object] = {
        "launcher": "mpiexec",
        "code": 0,
        "was_ended": False,
        "writes_state": False,
        "failure": None,
        "rank_0": None,
        "is_recorded": False,
    }
    return program_end(**{**defaults, **given})  # type: ignore[arg-type]  # a table of keyword arguments


@pytest.mark.parametrize(
    ("given", "code", "reason"),
    [
        ({}, 0, ""),
        ({"code": 3}, 3, "exit code 3"),
        ({"is_recorded": True, "rank_0": 0}, 0, ""),
        # The launcher hides a failure.
        ({"failure": FAILED}, 3, "rank 1 on n2 exited with code 3"),
        ({"failure": KILLED, "is_recorded": True, "rank_0": 0}, 137, "rank 1 on n2 was killed by SIGKILL"),
        # The largest code is that of a rank that the launcher has terminated.
        ({"failure": FAILED, "code": 143}, 3, "rank 1 on n2 exited with code 3"),
        # The program of rank 0 was killed together with its parent.
        ({"is_recorded": True}, 1, f"mpiexec exited with code 0, but rank 0 reported no exit code; {LOOK}"),
        ({"writes_state": True}, 1, f"{WITHOUT_STATE}; {LOOK}"),
        ({"code": 5, "writes_state": True}, 5, "exit code 5"),
        # The program requests to be run again.
        ({"is_recorded": True, "rank_0": 75}, 75, "rank 0 exited with code 75"),
        # Other ranks were not ready, and the launcher terminated them, before or after they noticed it.
        ({"code": 143, "is_recorded": True, "rank_0": 75}, 75, "rank 0 exited with code 75"),
        ({"failure": TERMINATED, "is_recorded": True, "rank_0": 75}, 75, "rank 0 exited with code 75"),
        ({"failure": FAILED, "is_recorded": True, "rank_0": 75}, 3, "rank 1 on n2 exited with code 3"),
        # The launcher hung after the end of the program, and was killed.
        ({"was_ended": True, "code": 137, "is_recorded": True, "rank_0": 0}, 0, "rank 0 exited with code 0"),
        ({"was_ended": True, "code": 137, "is_recorded": True}, 137, KILLED_LAUNCHER),
    ],
)  # fmt: skip
def test_how_a_program_ended(given: dict[str, object], code: int, reason: str) -> None:
    found = end_of(**given)
    assert (found.exit_code, found.reason) == (code, reason)


@pytest.mark.parametrize(
    ("state", "step", "code", "end", "expected"),
    [
        ("done", 60, 9, None, 0),
        ("failed", 60, 0, None, 1),
        ("failed", 60, 31, None, 31),
        ("failed", 60, 1, ERROR, 31),  # torchrun changes the exit code
        ("running", 10, 0, decisions.end_without_record(0, "mpiexec"), 1),
        ("running", 10, 137, KILLED, 137),
        ("running", 60, 137, KILLED, "rank 1 on n2 was killed by SIGKILL"),
        ("running", 60, 1, HANG, "rank 1 hangs"),
        ("running", 60, 1, ERROR, 31),
        ("requeue", 60, 255, None, "no time left"),
    ],
)
def test_a_run_without_a_final_state_is_resumed_only_after_progress(
    state: str, step: int, code: int, end: AttemptEnd | None, expected: int | str
) -> None:
    found = decisions.outcome(code, end, 10, SeenState(State(state), step, "no time left"))
    assert (found if isinstance(found, int) else (found.state, found.reason)) == (
        expected if isinstance(expected, int) else ("requeue", expected)
    )


# The start of an attempt. The last attempt was the second one, in job 17, and began at step 10.


@pytest.mark.parametrize(
    ("job_id", "number", "state", "step", "expected"),
    [
        # A manual submission, whatever the state is: the trainer decides.
        ("18", "", "done", 60, 1),
        ("18", "", "failed", 10, 1),
        # A successor.
        ("18", "3", "running", 60, 3),
        ("18", "3", "requeue", 60, 3),
        ("18", "3", "done", 60, "the training of 60 steps is complete; attempt 3 has nothing to do"),
        ("18", "3", "failed", 60, "the previous attempt failed: loss is nan; fix the cause, then submit"),
        ("18", "3", "requeue", 10, "the previous attempt made no progress, and the run is still at step 10"),
        ("18", "3", None, 0, "the previous attempt made no progress, and the run is still at step 0"),
        ("18", "21", "requeue", 60, "the run is at step 60 after 20 attempts, the maximum (--max-attempts)"),
        # A requeued job also runs after a failure, since its node may have been lost.
        ("17", "1", "running", 10, 3),
        ("17", "1", "failed", 10, 3),
        ("17", "1", "done", 60, "the training of 60 steps is complete; attempt 3 has nothing to do"),
        # Wrong numbers.
        ("18", "x[$(touch canary)]", "running", 60, "DDP_HPC_ATTEMPT is 'x[$(touch canary)]', but must be"),
        ("18", "0", "running", 60, "DDP_HPC_ATTEMPT is '0', but must be a positive integer"),
    ],
)
def test_which_attempt_begins_or_why_none_does(
    job_id: str, number: str, state: str | None, step: int, expected: int | str
) -> None:
    seen = SeenState(None if state is None else State(state), step, "loss is nan")
    found = _begun(job_id, seen, number)
    if isinstance(expected, int):
        assert found == (expected, job_id, step)
    else:
        assert str(found).startswith(expected)


@pytest.mark.parametrize("state", State)
def test_every_state_decides_what_a_job_does_that_finds_it(state: State) -> None:
    """A state that no job resumes by itself ends a queued job, and asks for none."""
    begun = _begun("18", SeenState(state, 60, "why"), "3")
    given = {"has_progressed": True, "attempt": ATTEMPT, "max_attempts": 20, "may_submit": True}
    refusal = why_no_job("", state=state, scheduler=SCHEDULERS["slurm"], **given)  # type: ignore[arg-type]
    if state.is_resumed_by_job:
        assert (begun, refusal) == ((3, "18", 60), None)
    else:
        assert refusal is not None
        assert refusal.why == f"the state of the run is {state}, so no other job is submitted"
        assert refusal.remedy == state.how_to_resume("resume it with")
        assert isinstance(begun, str) == state.is_final
    if state.is_stopped or state.is_complete:
        found = decisions.outcome(1, None, 10, SeenState(state, 60, "why"))
        assert (found if isinstance(found, int) else found.state) == (
            state if state.is_stopped else state.exit_code
        )


def test_a_job_that_finds_a_run_that_a_user_must_resume_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    row = _STATES[State.REQUEUE]._replace(resumed_by="user", before_resuming="remove the file `pause`")
    monkeypatch.setitem(_STATES, State.REQUEUE, row)
    for job_id, number in (("18", "3"), ("17", "1")):  # a successor, and a job that the scheduler requeued
        assert _begun(job_id, SeenState(State.REQUEUE, 60, "why"), number) == (
            "the state of the run is requeue at step 60: why; to resume it, remove the file `pause`, then "
            "submit the script again"
        )
    assert _begun("18", SeenState(State.REQUEUE, 60, "why"), "") == (1, "18", 60)  # the user has submitted it


def test_a_requeued_job_does_not_resume_a_failed_run_that_only_a_user_resumes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    row = _STATES[State.FAILED]._replace(resumed_by="user", before_resuming="look at the data")
    monkeypatch.setitem(_STATES, State.FAILED, row)
    for job_id, number in (("18", "3"), ("17", "1")):
        assert _begun(job_id, SeenState(State.FAILED, 60, "why"), number) == (
            "the previous attempt failed: why; look at the data, then submit the script again"
        )


def _begun(job_id: str, seen: SeenState, number: str) -> tuple[int, str, int] | str:
    """Returns the attempt that begins, or the message why none does."""
    try:
        begun = decisions.begin_attempt(job_id, seen, ATTEMPT, {"DDP_HPC_ATTEMPT": number}, 20)
    except DdpHpcError as error:
        return str(error)
    if isinstance(begun, Attempt):
        return begun.number, begun.job_id, begun.first_step
    assert begun.code == (75 if seen.state is None or not seen.state.is_final else seen.state.exit_code)
    return begun.message


@pytest.mark.parametrize(
    ("stopped_s", "cause", "is_cancelled", "expected"),
    [
        (None, "unknown", False, ""),
        (None, "unknown", True, "cancelled"),
        (500.0, "unknown", False, "unknown"),
        (980.0, "unknown", False, "walltime"),  # at most 30 s before the end
        (500.0, "walltime", False, "walltime"),  # the walltime was shortened
        (980.0, "cancelled", False, "cancelled"),
        (980.0, "requeued", False, "requeued"),
        (980.0, "walltime", True, "cancelled"),
    ],
)
def test_why_a_job_was_stopped(
    stopped_s: float | None, cause: StopCause, is_cancelled: bool, expected: str
) -> None:
    assert why_stopped(stopped_s, cause, 1000.0, is_cancelled=is_cancelled) == expected


@pytest.mark.parametrize(
    ("stop", "more", "why"),
    [
        ("", {}, None),
        ("walltime", {}, None),
        ("requeued", {}, "Slurm has requeued this job, which will resume the run"),
        ("cancelled", {"has_progressed": False}, "the job was cancelled, so no other job is submitted"),
        ("preempted", {}, "the job was preempted, so no other job is submitted"),
        (
            "unknown",
            {},
            "the job received SIGTERM before the end of its walltime, so no other job is submitted",
        ),
        ("", {"has_progressed": False}, "attempt 2 made no progress: it began at step 10"),
        ("", {"max_attempts": 2}, "attempt 2 was the last that --max-attempts allows"),
        ("", {"may_submit": False}, "compute nodes cannot submit jobs at this site"),
        ("", {"scheduler": SCHEDULERS["local"]}, "no successor is submitted under profile local"),
    ],
)
def test_why_no_other_job_is_requested(
    stop: decisions.SigtermCause, more: dict[str, object], why: str | None
) -> None:
    given = {
        "state": State.REQUEUE,
        "has_progressed": True,
        "attempt": ATTEMPT,
        "max_attempts": 20,
        "scheduler": SCHEDULERS["slurm"],
        "may_submit": True,
        **more,
    }
    found = why_no_job(stop, **given)  # type: ignore[arg-type]  # a table of keyword arguments
    assert (found.why if found else None) == why


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ("srun -n 2 python -m ddp_hpc.train --epochs 3", True),
        ("mpiexec -n 2 ddp-hpc train --epochs 3", True),
        ("srun torchrun_script.sh python -m ddp_hpc.train", True),
        ("mpiexec -n 2 ddp-hpc exec -- python train.py", False),
        ("srun ddp-hpc exec -- python my.py --module ddp_hpc", False),
    ],
)
def test_which_programs_always_write_their_final_state(argv: str, expected: bool) -> None:
    assert decisions.writes_its_state(argv.split()) is expected


# The patience with a launcher. The run wrote its final state at 1000 s.


@pytest.mark.parametrize(
    ("now_s", "final_since_s", "terminated_s", "last_s", "action"),
    [
        (5000.0, None, None, None, "wait"),  # the run goes on
        (1000.0 + FINAL_S - 1, 1000.0, None, None, "wait"),
        (1000.0 + FINAL_S, 1000.0, None, None, "terminate"),
        (1032.0, 1000.0, 1030.0, None, "wait"),
        (1036.0, 1000.0, 1030.0, None, "kill"),
        # 20 s are left: there must be time for SIGTERM, SIGKILL and the submission of another job.
        (1010.0, 1000.0, None, 1020.0, "wait"),
        (1015.0, 1000.0, None, 1020.0, "terminate"),
        (1020.0, 1000.0, 1015.0, 1020.0, "kill"),
        # 3 s are left.
        (1000.0, 1000.0, None, 1003.0, "terminate"),
        (1003.0, 1000.0, 1000.0, 1003.0, "kill"),
        # The walltime has ended, and the run has not written its final state.
        (1019.0, None, None, 1020.0, "wait"),
        (1020.0, None, None, 1020.0, "kill"),
    ],
)
def test_the_deadline_limits_the_patience_with_a_launcher(
    now_s: float,
    final_since_s: float | None,
    terminated_s: float | None,
    last_s: float | None,
    action: Action,
) -> None:
    assert next_action(now_s, final_since_s, terminated_s, last_s) == action
