"""What the supervisor decides: how a program ended, why its job was stopped, and which job follows."""

from __future__ import annotations

import pytest

from ddp_hpc.base.rank_ends import RankEnd
from ddp_hpc.base.run_state import State
from ddp_hpc.queue.submission_ledger import Attempt
from ddp_hpc.schedulers.registry import SCHEDULERS
from ddp_hpc.schedulers.running_job import StopCause
from ddp_hpc.supervisor import decisions
from ddp_hpc.supervisor.decisions import ProgramEnd, program_end, why_no_job, why_stopped
from ddp_hpc.supervisor.launcher_patience import FINAL_S, Action, LauncherView, next_action
from ddp_hpc.supervisor.run_files import SeenState

ATTEMPT = Attempt(number=2, job_id="17", first_step=10, at_s=1700000000)
FAILED = RankEnd(rank=1, world_size=2, host="n2", exit_code=3, signal=0, at_s=1.0)
KILLED = RankEnd(rank=1, world_size=2, host="n2", exit_code=137, signal=9, at_s=1.0)
LOOK = "look for the cause in the log"
WITHOUT_STATE = "mpiexec exited with code 0, but the training has not written its final state"
KILLED_LAUNCHER = "mpiexec did not end and was killed; look in the log for ranks that hang"
ALONE = RankEnd(rank=0, world_size=2, host="n1", exit_code=1, signal=0, at_s=1.0, reason="has no other ranks")


def end_of(**given: object) -> ProgramEnd:
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
        ({"failure": ALONE}, 1, "rank 0 on n1 has no other ranks"),
        # The largest code is that of a rank that the launcher has terminated.
        ({"failure": FAILED, "code": 143}, 143, "rank 1 on n2 exited with code 3"),
        # The program of rank 0 was killed together with its parent.
        ({"is_recorded": True}, 1, f"mpiexec exited with code 0, but rank 0 did not end; {LOOK}"),
        ({"writes_state": True}, 1, f"{WITHOUT_STATE}; {LOOK}"),
        ({"code": 5, "writes_state": True}, 5, "exit code 5"),
        # The program requests to be run again.
        ({"is_recorded": True, "rank_0": 75}, 75, "rank 0 exited with code 75"),
        # The launcher hung after the end of the program, and was killed.
        ({"was_ended": True, "code": 137, "is_recorded": True, "rank_0": 0}, 0, "rank 0 exited with code 0"),
        ({"was_ended": True, "code": 137, "is_recorded": True}, 137, KILLED_LAUNCHER),
    ],
)  # fmt: skip
def test_how_a_program_ended(given: dict[str, object], code: int, reason: str) -> None:
    found = end_of(**given)
    assert (found.code, found.reason) == (code, reason)


@pytest.mark.parametrize(
    ("state", "step", "code", "expected"),
    [
        ("done", 60, 9, 0),
        ("failed", 60, 0, 1),
        ("failed", 60, 31, 31),
        ("running", 10, 0, 1),
        ("running", 10, 137, 137),
        ("running", 60, 0, "mpiexec exited with code 0 and no rank reported a reason"),
        ("running", 60, 137, "mpiexec exited with code 137 and no rank reported a reason"),
        ("requeue", 60, 255, "no time left"),
    ],
)
def test_a_run_without_a_final_state_is_resumed_only_after_progress(
    state: str, step: int, code: int, expected: int | str
) -> None:
    found = decisions.outcome(code, 10, SeenState(State(state), step, "no time left"), "mpiexec")
    assert (found if isinstance(found, int) else (found.state, found.reason)) == (
        expected if isinstance(expected, int) else ("requeue", expected)
    )


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
        ("requeued", {}, "Slurm runs this job again, which resumes the run"),
        ("cancelled", {"has_progressed": False}, "the job was cancelled, so nothing is submitted"),
        ("preempted", {}, "the job was preempted, so nothing is submitted"),
        ("unknown", {}, "a signal arrived before the end of the walltime, so nothing is submitted"),
        ("", {"has_progressed": False}, "attempt 2 made no progress: it began at step 10"),
        ("", {"chained": "3"}, "this was job 2 of a chain of 3"),
        ("", {"max_attempts": 2}, "attempt 2 was the last (--max-attempts)"),
        ("", {"may_submit": False}, "compute nodes cannot submit jobs at this site"),
        ("", {"scheduler": SCHEDULERS["local"]}, "no successor is submitted under profile local"),
    ],
)
def test_why_no_other_job_is_requested(
    stop: decisions.Stop, more: dict[str, object], why: str | None
) -> None:
    given = {
        "has_progressed": True,
        "attempt": ATTEMPT,
        "chained": "",
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
    view = LauncherView(now_s=now_s, final_since_s=final_since_s, terminated_s=terminated_s, last_s=last_s)
    assert next_action(view) == action
