"""Failures after which a job starts its ranks again, and failures after which it does not."""

from __future__ import annotations

import errno
import json
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest

from ddp_hpc.base.attempt_end import AttemptEnd
from ddp_hpc.base.errors import DdpHpcError, RequestError
from ddp_hpc.base.run_outcomes import Cause, State
from ddp_hpc.base.run_state import RunState, write_state
from ddp_hpc.queue.run_cost import run_cost
from ddp_hpc.queue.submission_ledger import Attempt, record_attempt
from ddp_hpc.supervisor.attempts_in_job import run_attempts
from ddp_hpc.supervisor.decisions import LAUNCHER_HUNG
from ddp_hpc.supervisor.ended_attempt import EndedAttempt
from ddp_hpc.supervisor.job_clock import JobClock
from ddp_hpc.supervisor.launch import Launch
from ddp_hpc.supervisor.launcher_process import LauncherEnd
from ddp_hpc.supervisor.restarts import why_no_restart, why_no_time
from ddp_hpc.supervisor.run_files import RunFiles, SeenState
from ddp_hpc.supervisor.settings import Settings
from tests.batch.conftest import Sandbox
from tests.batch.test_requeue import COMMAND, calls, command, folder, job
from tests.batch.test_requeue import run as run_training
from tests.batch.test_scripts_run import script, slurm
from tests.supervisor.test_any_program import TOUCH, run

__all__ = ["job"]

COUNT = "n=$(cat n 2>/dev/null || echo 0); echo $((n + 1)) >n; "
"""Counts the starts: $n is 0 in the first one."""


def starts(job: Sandbox) -> int:
    return int((job.work / "n").read_text())


def attempts(job: Sandbox) -> list[str]:
    """The number, the job and the first step of each attempt."""
    return [line.rpartition(" ")[0] for line in (folder(job) / "attempts").read_text().splitlines()]


def end_of_rank(cause: str, step: int | str = "null", exception: str = "") -> str:
    """Bash text with which a rank records its end."""
    return (
        rf"""printf '{{"attempt": "%s", "cause": "{cause}", "exit_code": 1, "reason": "rank 1 ended", """
        rf""""rank": 1, "host": "n2", "step": {step}, "exception": "{exception}"}}\n' """
        r""""$DDP_HPC_THIS_ATTEMPT" >$DDP_HPC_RUN_DIR/end; """
    )


# Programs that know nothing of ddp-hpc


def test_a_program_that_is_killed_after_a_checkpoint_is_started_again_in_the_same_job(job: Sandbox) -> None:
    done = run(job, f"{COUNT}{TOUCH} ((n)) && exit 0; kill -9 $$")
    assert (done.returncode, starts(job), calls(job, "scontrol")) == (0, 2, [])
    assert attempts(job) == ["1 7 0", "2 7 0"]
    assert (folder(job) / "state").read_text().startswith("done ")
    assert b"ddp-hpc: restart 1 of 3 in this job, because attempt 1 failed: exit code 137\n" in done.stdout


def test_a_job_records_when_its_launchers_began_and_ended_and_its_last_checkpoint(job: Sandbox) -> None:
    run(job, f"{COUNT}{TOUCH} ((n)) && exit 0; kill -9 $$")
    lines = [json.loads(line) for line in (folder(job) / "timeline").read_text().splitlines()]
    assert [(line["attempt"], line["moment"]) for line in lines] == [
        ("1 7", "job began"),
        ("1 7", "launcher started"),
        ("1 7", "launcher ended"),
        ("1 7", "attempt ended"),
        ("2 7", "launcher started"),
        ("2 7", "launcher ended"),
        ("2 7", "attempt ended"),
        ("1 7", "job ended"),
    ]
    times = [line["at_s"] for line in lines]
    assert times == sorted(times)
    assert lines[0]["num_nodes"] == 1
    assert lines[1]["at_s"] <= lines[2]["checkpoint_s"] <= lines[2]["at_s"]
    assert lines[3]["reason"] == "exit code 137"


@pytest.mark.parametrize("then", ["exit 3", "kill -9 $$"])
def test_a_program_without_a_checkpoint_is_not_started_again(job: Sandbox, then: str) -> None:
    done = run(job, f"{COUNT} {then}")
    assert (done.returncode, starts(job)) == (137 if "kill" in then else 3, 1)
    assert (
        b"the ranks are not started again in this job: the run has no snapshot and no recorded checkpoint"
        in done.stdout
    )


def test_with_restarts_0_nothing_is_started_again(job: Sandbox) -> None:
    done = run(job, f"{COUNT}{TOUCH} exit 3", restarts=0)
    assert (done.returncode, starts(job)) == (3, 1)
    assert b"the ranks are not started again in this job: --restarts is 0\n" in done.stdout


def test_a_program_that_fails_after_the_same_checkpoint_again_ends_with_its_own_exit_code(
    job: Sandbox,
) -> None:
    done = run(job, f"{COUNT} ((n)) || {TOUCH} exit 3")
    assert (done.returncode, starts(job), calls(job, "scontrol")) == (3, 2, [])
    assert (folder(job) / "state").read_text() == (
        "failed 0 the run has failed twice after the same checkpoint: exit code 3\n"
    )
    why = "the run has failed twice after the same checkpoint: exit code 3"
    assert f"the ranks are not started again in this job: {why}\n".encode() in done.stdout
    cost = run_cost(folder(job), is_running=False)
    assert cost is not None
    assert cost.not_restarted == why
    assert b"error: the run has failed twice after the same checkpoint: exit code 3\n" in done.stderr


def test_kills_after_the_same_checkpoint_are_not_taken_for_an_error_of_the_program(job: Sandbox) -> None:
    done = run(job, f"{COUNT} ((n)) || {TOUCH} ((n == 2)) && exit 0; kill -9 $$")
    assert (done.returncode, starts(job)) == (0, 3)


def test_a_program_that_fails_after_other_checkpoints_is_restarted_as_often_as_restarts_says(
    job: Sandbox,
) -> None:
    done = run(job, f"{COUNT}{TOUCH} exit 3", restarts=2)
    assert (done.returncode, starts(job)) == (3, 3)
    assert (
        b"the ranks are not started again in this job: this job has used all its restarts (--restarts 2)"
        in done.stdout
    )


def test_a_restart_that_completes_the_run_counts_even_if_its_ranks_record_nothing(job: Sandbox) -> None:
    """Such as under torchrun after the loss of a node, which the supervisor has recorded."""
    lost = f"{end_of_rank('lost rank')} exit 1"
    done = run(job, f"{COUNT}{TOUCH} ((n)) && exit 0; {lost}")
    assert (done.returncode, starts(job)) == (0, 2)
    assert (folder(job) / "state").read_text().startswith("done ")


def test_near_the_end_of_the_walltime_nothing_is_started_again(job: Sandbox) -> None:
    done = run(job, f"{COUNT}{TOUCH} exit 3", left_s=100.0)
    assert (done.returncode, starts(job)) == (3, 1)
    assert b"s of the walltime are left, and a restart needs 120 s" in done.stdout


def test_after_sigterm_nothing_is_started_again(job: Sandbox) -> None:
    run(job, f"{COUNT}{TOUCH} kill -TERM $PPID; sleep 1; exit 3")
    assert starts(job) == 1


# ddp_hpc.train


def training(job: Sandbox, then: str) -> subprocess.CompletedProcess[bytes]:
    return run_training(job, COUNT + then)


def test_a_training_that_has_lost_a_rank_resumes_in_the_same_job(job: Sandbox) -> None:
    lost = f"say requeue 30 rank 1 ended; {end_of_rank('lost rank')} exit 1"
    done = training(job, f"((n)) && {{ say done 60; exit 0; }}; {lost}")
    assert (done.returncode, calls(job, "scontrol")) == (0, [])
    assert attempts(job) == ["1 7 0", "2 7 30"]
    assert b"restart 1 of 3 in this job, from step 30, because attempt 1 failed: rank 1 ended" in done.stdout


@pytest.mark.parametrize("then", ["kill -9 $$", "exit 75"])
def test_ranks_that_stop_because_their_launcher_was_killed_are_started_again(job: Sandbox, then: str) -> None:
    stopped = f"say requeue 30 rank 0 received SIGTERM; {end_of_rank('stopped')} {then}"
    done = training(job, f"((n)) && {{ say done 60; exit 0; }}; {stopped}")
    assert starts(job) == (1 if "exit" in then else 2)
    assert calls(job, "scontrol") == (["requeue 7"] if "exit" in then else [])
    assert done.returncode == (75 if "exit" in then else 0)


def test_a_restart_that_is_lost_before_its_first_snapshot_leaves_the_run_to_another_job(job: Sandbox) -> None:
    first = f"say requeue 30 rank 1 ended; {end_of_rank('lost rank')} exit 1"
    done = training(job, f"((n)) || {{ {first}; }}; say failed 30 again; {end_of_rank('lost rank')} exit 1")
    assert (starts(job), calls(job, "scontrol")) == (3, ["requeue 7"])
    assert done.returncode == 75
    assert (folder(job) / "state").read_text() == "requeue 30 rank 1 ended\n"


def test_a_restart_that_is_refused_leaves_the_run_to_another_job(job: Sandbox) -> None:
    first = f"say requeue 30 rank 1 ended; {end_of_rank('lost rank')} exit 1"
    done = training(job, f"((n)) || {{ {first}; }}; {end_of_rank('refused')} exit 2")
    assert (done.returncode, starts(job), calls(job, "scontrol")) == (75, 2, ["requeue 7"])
    assert attempts(job) == ["1 7 0"]


def test_a_training_that_fails_in_the_same_step_again_is_not_resumed_by_a_job(job: Sandbox) -> None:
    failed = f"say failed $((30 + n)) ValueError: odd; {end_of_rank('failed', 35, 'ValueError')} exit 1"
    done = training(job, failed)
    assert (done.returncode, starts(job), calls(job, "scontrol")) == (1, 2, [])
    assert (folder(job) / "state").read_text() == (
        "failed 31 the run has failed twice in step 35: rank 1 ended\n"
    )


def test_a_restart_whose_ranks_do_not_begin_leaves_the_run_to_another_job(job: Sandbox) -> None:
    """As if the launcher could not reach a node that has died."""
    first = f"say requeue 30 rank 1 ended; {end_of_rank('lost rank')} exit 1"
    done = training(job, f"((n)) || {{ {first}; }}; exit 1")
    assert (done.returncode, starts(job), calls(job, "scontrol")) == (75, 2, ["requeue 7"])


@pytest.mark.parametrize("cause", ["out of memory", "out of time", "interrupted"])
def test_causes_that_another_start_does_not_repair(job: Sandbox, cause: str) -> None:
    training(job, f"say failed 30 x; {end_of_rank(cause, 35, 'Error')} exit 1")
    assert starts(job) == 1


KILLED = f"say requeue 30 rank 0 received SIGTERM; {end_of_rank('stopped')} kill -9 $$"


def when_asked_for_steps(job: Sandbox, then: str) -> None:
    """Runs this bash text instead of `scontrol show step`."""
    text = COMMAND.format(record=f"{job.record}.scontrol", code=0, says="")
    asked = f'[[ $* == *"show step"* ]] && {{ {then}; exit; }}'
    job.program("scontrol", text.replace("\n", f"\n{asked}\n", 1))


def test_a_job_that_is_cancelled_while_its_ranks_are_ended_is_neither_restarted_nor_requeued(
    job: Sandbox,
) -> None:
    when_asked_for_steps(job, "kill -TERM $PPID")
    done = training(job, KILLED)
    assert (starts(job), calls(job, "scontrol")) == (1, [])
    assert b"received SIGTERM before the end of its walltime, so no other job is submitted" in done.stdout


def test_a_job_that_slurm_already_ends_is_neither_restarted_nor_requeued(job: Sandbox) -> None:
    """slurmd signals one step after the other, and an ending step delays that of the script."""
    command(job, "scontrol", says="JobId=7 JobState=COMPLETING Reason=None Restarts=0")
    training(job, f"say requeue 30 rank 1 ended; {end_of_rank('lost rank')} exit 1")
    assert (starts(job), calls(job, "scontrol")) == (1, [])


def test_if_ranks_of_a_killed_launcher_may_still_run_another_job_resumes_the_run(job: Sandbox) -> None:
    when_asked_for_steps(job, "head -c 70000000 /dev/zero")  # not a valid answer
    done = training(job, KILLED)
    assert (starts(job), calls(job, "scontrol")) == (1, ["requeue 7"])
    assert (
        b"not started again in this job: the launcher was killed, and its ranks may still be running\n"
        in done.stdout
    )


def test_a_restart_changes_nothing_if_the_job_was_started_elsewhere_meanwhile(job: Sandbox) -> None:
    """The network of this node was down, and Slurm has requeued the job."""
    first = f"say requeue 30 rank 1 ended; {end_of_rank('lost rank')} exit 1"
    elsewhere = "echo 3 7 30 1 >>$DDP_HPC_RUN_DIR/attempts; say running 40"
    training(job, f"((n)) || {{ {first}; }}; {elsewhere}; exit 1")
    assert (starts(job), calls(job, "scontrol")) == (2, [])
    assert (folder(job) / "state").read_text() == "running 40\n"


def test_spare_nodes_with_a_launch_line_that_does_not_begin_with_srun_are_refused(job: Sandbox) -> None:
    text = script("generic_slurm", spare_nodes=1).replace("\n  srun ", "\n  env srun ")
    done = job.run(text, **slurm(job, 3, SLURM_JOB_ID="7", SLURM_JOB_NODELIST="n[1-3]"))
    assert done.returncode == 2
    assert b"the launch line begins with env; it must begin with srun, since only srun can" in done.stderr


def attempts_in(
    directory: Path, launch: Callable[..., LauncherEnd], pool: Mock | None = None, **options: object
) -> EndedAttempt:
    """Runs the attempts of a job whose launcher is the function `launch`."""
    files, attempt = RunFiles(directory), Attempt(number=1, job_id="7", first_step=0, at_s=0)
    record_attempt(directory, attempt)
    return run_attempts(
        attempt,
        cast("Launch", SimpleNamespace(launcher="srun", writes_state=False, pool=pool, run=launch)),
        cast(
            "JobClock",
            SimpleNamespace(stopped_s=None, end_s=None, ranks_left_s=900.0, is_ending=lambda: False),
        ),
        files,
        settings(progress=(), **options),
    )


def test_if_another_attempt_cannot_be_recorded_the_end_of_the_last_one_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launch(*_: object) -> LauncherEnd:
        (tmp_path / "progress").write_text("30")
        return LauncherEnd(3)

    monkeypatch.setattr(RunFiles, "begin_again", Mock(side_effect=DdpHpcError("the disk is full")))
    end = attempts_in(tmp_path, launch)
    assert (end.attempt.number, end.outcome) == (1, 3)


@pytest.mark.parametrize(
    "error",
    [
        RequestError("cannot start srun (Cannot allocate memory)"),
        OSError(errno.ENOSPC, "No space left on device", "runs/ddp/nodes"),
    ],
)
def test_if_the_launcher_cannot_be_started_again_another_job_resumes_the_run(
    tmp_path: Path, error: Exception
) -> None:
    def launch(_: object, files: RunFiles, attempt: Attempt, find_hang: object) -> LauncherEnd:
        if attempt.number > 1:
            raise error
        files.write_end(attempt, AttemptEnd(cause=Cause.LOST_RANK, exit_code=1, reason="n2 was lost"))
        write_state(tmp_path, RunState(State.RUNNING, 30, ""))
        return LauncherEnd(1)

    end = attempts_in(tmp_path, launch)
    assert end.attempt.number == 2
    assert isinstance(end.outcome, SeenState)
    assert (end.outcome.state, end.outcome.step, end.outcome.reason) == (State.REQUEUE, 30, "n2 was lost")


def test_without_a_restart_no_node_is_replaced(tmp_path: Path) -> None:
    def launch(_: object, files: RunFiles, attempt: Attempt, find_hang: object) -> LauncherEnd:
        write_state(tmp_path, RunState(State.RUNNING, 30, ""))
        lost = AttemptEnd(cause=Cause.LOST_RANK, exit_code=1, reason="why", host="n2")
        files.write_end(attempt, lost)
        return LauncherEnd(1)

    pool = Mock(replace_bad=Mock(return_value=""))
    assert attempts_in(tmp_path, launch, pool, restarts=1).attempt.number == 2
    assert pool.replaceable.call_args.args == ("n2",)
    assert pool.replace_bad.call_count == 1, "only before the restart"


# The decision


def ended(
    cause: Cause = Cause.LOST_RANK,
    *,
    began: int = 10,
    step: int = 30,
    number: int = 2,
    state: State = State.FAILED,
    **end: object,
) -> EndedAttempt:
    recorded = AttemptEnd(cause=cause, exit_code=1, reason="why", **end)  # type: ignore[arg-type]  # a table
    after = SeenState(state, step, "why")
    attempt = Attempt(number=number, job_id="7", first_step=began, at_s=0)
    return EndedAttempt(attempt=attempt, launcher=LauncherEnd(1), after=after, outcome=1, end=recorded)


def settings(**changes: object) -> Settings:
    values = {"max_attempts": 20, "restarts": 3, "node_check": "off", **changes}
    given = dict.fromkeys(Settings.__dataclass_fields__)
    return Settings(**{**given, **values})  # type: ignore[arg-type]  # the others are not used


@pytest.mark.parametrize("cause", Cause)
def test_only_failures_that_another_start_can_repair_are_restarted(cause: Cause) -> None:
    repairable = {Cause.FAILED, Cause.EXITED, Cause.LOST_RANK, Cause.HANG}
    assert ended(cause).may_restart == (cause in repairable)
    assert not ended(cause, state=State.DONE).may_restart, "a node was lost after the end"
    is_explained = cause in repairable or cause in (Cause.DONE, Cause.STOPPED, Cause.REFUSED)
    assert bool(ended(cause).why_final) == (not is_explained), "a failure that is not repaired has a reason"


@pytest.mark.parametrize("cause", [Cause.STOPPED, Cause.OUT_OF_TIME])
def test_ranks_that_got_sigterm_because_an_agent_was_killed_are_started_again(cause: Cause) -> None:
    assert replace(ended(cause), launcher=LauncherEnd(137)).may_restart
    assert not replace(ended(cause), launcher=LauncherEnd(137), stop="walltime").may_restart
    assert not replace(ended(cause), launcher=LauncherEnd(137, was_ended=True)).may_restart
    assert not ended(cause).may_restart, "a user stopped them, or the walltime was about to end"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"stop": "cancelled"}, "the job was cancelled"),
        ({"stop": "walltime"}, "the walltime is about to end"),
        ({"launcher": LauncherEnd(1, was_signalled_early=True)}, "--requeue on-signal"),
        ({"refusal": LAUNCHER_HUNG}, "the launcher had to be killed"),
    ],
)
def test_why_no_other_start_can_help_after_a_failure(changes: dict[str, Any], why: str) -> None:
    last = replace(ended(), **changes)
    assert last.has_failed
    assert not last.may_restart
    assert why in why_no_restart(last, None, last, settings(), num_restarts=0)


def test_too_little_walltime_for_a_restart() -> None:
    why = why_no_time(cast("JobClock", SimpleNamespace(ranks_left_s=90.0)), settings())
    assert why == "only 90 s of the walltime are left, and a restart needs 120 s"


@pytest.mark.parametrize(
    ("earlier", "changes", "why"),
    [
        (None, {}, ""),
        (ended(), {}, ""),
        (ended(step=10), {"step": 10}, "two attempts in a row have saved no snapshot"),
        (ended(), {"step": 10}, ""),
        (ended(step=10), {}, ""),
        (None, {"number": 20}, "attempt 20 was the last that --max-attempts allows"),
        (None, {"began": 0, "step": 0}, "the run has no snapshot and no recorded checkpoint"),
    ],
)
def test_why_the_ranks_are_not_started_again(
    earlier: EndedAttempt | None, changes: dict[str, int], why: str
) -> None:
    now = ended(**changes)  # type: ignore[arg-type]  # a table
    assert why_no_restart(now, earlier, None, settings(), num_restarts=1) == why


def test_a_run_without_a_snapshot_begins_again_only_after_the_loss_of_a_rank() -> None:
    def why(last: EndedAttempt, earlier: EndedAttempt | None = None, *, may: bool = True) -> str:
        return why_no_restart(last, earlier, None, settings(), num_restarts=1, may_begin_again=may)

    nothing, twice = "the run has no snapshot and no recorded checkpoint", "two attempts in a row have saved"
    lost = ended(began=0, step=0)
    assert why(lost) == ""
    assert why(lost, may=False) == nothing, "another program may have saved something that is not recorded"
    assert why(ended(Cause.FAILED, began=0, step=0)) == nothing
    assert why(ended(Cause.HANG, began=0, step=0)) == nothing
    assert why(lost, lost).startswith(twice), "the program can be the cause"
    without_node = replace(lost, launcher=LauncherEnd(1, lost_nodes=("n2",)))
    assert why(without_node, without_node) == "", "each of them has used up a spare node"


def test_the_program_itself_fails_if_it_ends_at_the_same_place_twice() -> None:
    def fails(
        cause: Cause = Cause.FAILED,
        at: int | None = 35,
        exception: str = "ValueError",
        saved: int = 30,
        code: int = 1,
    ) -> EndedAttempt:
        attempt = Attempt(number=2, job_id="7", first_step=30, at_s=0)
        end = AttemptEnd(cause=cause, exit_code=code, reason="why", step=at, exception=exception)
        after = SeenState(State.FAILED, saved, "")
        return EndedAttempt(attempt=attempt, launcher=LauncherEnd(code), after=after, outcome=1, end=end)

    assert fails().repeats(fails())
    assert fails(saved=34).repeats(fails()), "it has only saved a newer snapshot before"
    assert not fails().repeats(fails(at=34))
    assert not fails().repeats(fails(exception="KeyError"))
    assert not fails().repeats(None)
    assert not fails(Cause.LOST_RANK).repeats(fails(Cause.LOST_RANK)), "the rank can be on a bad node"
    crash = fails(Cause.LOST_RANK, at=None, exception="", code=139)
    assert crash.repeats(crash), "SIGSEGV comes from the program"
    kill = fails(Cause.LOST_RANK, at=None, exception="", code=137)
    assert not kill.repeats(kill), "SIGKILL comes from outside"
    plain = fails(Cause.EXITED, at=None, exception="")
    assert plain.repeats(plain)
    assert not fails(Cause.EXITED, at=None, exception="", saved=40).repeats(plain)


@pytest.mark.parametrize(
    ("cause", "hosts", "saved", "suspect"),
    [
        (Cause.LOST_RANK, ("n2", "n2"), 30, "n2"),
        (Cause.HANG, ("n2", "n2"), 30, "n2"),
        (Cause.LOST_RANK, ("n1", "n2"), 30, ""),
        (Cause.LOST_RANK, ("n2", "n2"), 31, ""),
        (Cause.STOPPED, ("n2", "n2"), 30, ""),
        (Cause.FAILED, ("n2", "n2"), 30, ""),
    ],
    ids=["lost", "hung", "other nodes", "progress", "victims of SIGTERM", "the same exception"],
)
def test_only_a_node_on_which_two_attempts_have_failed_without_progress_is_suspected(
    cause: Cause, hosts: tuple[str, str], saved: int, suspect: str
) -> None:
    def fails(host: str, saved: int) -> EndedAttempt:
        attempt = Attempt(number=2, job_id="7", first_step=30, at_s=0)
        end = AttemptEnd(cause=cause, exit_code=1, reason="why", step=35, exception="ValueError", host=host)
        after = SeenState(State.FAILED, saved, "")
        return EndedAttempt(attempt=attempt, launcher=LauncherEnd(1), after=after, outcome=1, end=end)

    one, two = fails(hosts[0], 30), fails(hosts[1], saved)
    assert two.suspected_node(None) == ""
    assert two.suspected_node(one) == suspect
