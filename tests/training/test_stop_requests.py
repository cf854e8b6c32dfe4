"""Preemption by a signal or the deadline: all ranks save and stop together, or are ended as a last resort."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ddp_hpc.base.process_control import STOP_SIGNALS
from ddp_hpc.base.run_outcomes import Cause, State, Stop
from ddp_hpc.base.run_state import RunState
from ddp_hpc.schedulers.deadline import Deadline
from ddp_hpc.training import session
from ddp_hpc.training.run.parts import Parts
from ddp_hpc.training.run.stop_protocol import TIME_LIMIT, OwnRequest
from ddp_hpc.training.run.stop_requests import StopRequests
from tests.waiting import PATIENCE

from .forked import Forks
from .runs import error_lines, train
from .tiny import DATA, EPOCHS, SAVING, STEPS, assert_equal, state_of, trained

PLANTED = "tests.training.planted"
RUN = [*DATA, *SAVING, "--epochs", str(EPOCHS), "--log-every", "1"]
ENDLESS = [*DATA, *SAVING, "--epochs", "100000", "--log-every", "1"]


@pytest.mark.parametrize(("name", "rank"), [("SIGTERM", 1), ("SIGUSR1", 0), ("SIGUSR2", 1), ("SIGINT", 0)])
def test_a_signal_to_one_rank_stops_all_ranks_with_their_state_saved(
    home: Path, whole: Path, forks: Forks, name: str, rank: int
) -> None:
    job = forks.start(*RUN, cwd=home, ranks=2, program=PLANTED, env={"PLANT": f"{name}:{rank}"})
    assert job.wait() == [75, 0]
    assert job.errors() == []
    why = f"rank {rank} received {name}"
    assert job.words().count(why) == 1
    assert (
        f"Stopping: {why}. State saved; run the same command again to resume.\nstopped: 2 of {STEPS} steps"
        in job.words()
    )
    assert state_of(home) == RunState(State.REQUEUE, 2, why)
    assert sorted(path.name for path in (home / "run").iterdir()) == [
        "config.toml",
        "state",
        "step_00000002",
    ]
    assert trained(home) == trained(whole)[:2]


def test_the_next_run_resumes_like_an_uninterrupted_one(home: Path, whole: Path, forks: Forks) -> None:
    stopped = forks.start(*RUN, cwd=home, ranks=2, program=PLANTED, env={"PLANT": "SIGTERM:0"})
    stopped.wait()
    words = forks.run(*RUN, cwd=home, ranks=2).words()
    assert "resuming after step 2 (epoch 1, 32 of its samples used)" in words
    assert f"done: {STEPS} steps ({STEPS - 2} in this attempt)" in words
    assert_equal(home, whole, STEPS)
    assert state_of(home) == RunState(State.DONE, STEPS, "training complete")


@pytest.mark.check
def test_with_losses_read_a_step_later_each_step_before_a_stop_is_written_once(
    home: Path, forks: Forks
) -> None:
    steps = 0
    for rank in (1, 0):
        words = [*ENDLESS, "--log-every", "3"]
        job = forks.start(*words, cwd=home, ranks=2, program="tests.training.delayed")
        _until(lambda: (home / "m.jsonl").exists() and len(trained(home)) > steps + 1)  # noqa: B023
        os.kill(job.pids[rank], signal.SIGTERM)
        assert job.wait() == [75, 0], job.words()
        state, steps = state_of(home), len(trained(home))
        assert [one["step"] for one in trained(home)] == list(range(1, steps + 1))
        newest = max(path.name for path in (home / "run").iterdir())
        assert (state.state, state.step, newest) == ("requeue", steps, f"step_{steps:08d}")


@pytest.mark.check
@pytest.mark.parametrize(("launcher", "code"), [("mpiexec", 75), ("torchrun", 0)])
def test_the_exit_code_is_75_and_0_under_torchrun(home: Path, launcher: str, code: int) -> None:
    program = ["-m", PLANTED] if launcher == "mpiexec" else [str(Path(__file__).with_name("planted.py"))]
    done = train(*RUN, cwd=home, ranks=2, launcher=launcher, program=program, env={"PLANT": "SIGTERM:1"})
    assert done.returncode == code, done.stderr
    assert error_lines(done) == []
    assert "Traceback" not in done.stderr
    assert state_of(home) == RunState(State.REQUEUE, 2, "rank 1 received SIGTERM")


@pytest.mark.check
def test_workers_ignore_signals(home: Path, forks: Forks) -> None:
    job = forks.start(*ENDLESS, "--workers", "1", cwd=home, ranks=1)
    _until(lambda: (home / "m.jsonl").exists() and len(trained(home)) > 1)
    children = Path(f"/proc/{job.pids[0]}/task/{job.pids[0]}/children").read_text().split()
    for pid in (*map(int, children), job.pids[0]):
        os.kill(pid, signal.SIGTERM)  # to all processes of the job, like schedulers
    assert job.wait() == [75], job.words()
    assert state_of(home).state == "requeue"


def test_a_deadline_in_the_past_is_rejected_in_one_line(home: Path, forks: Forks) -> None:
    job = forks.start(*RUN, cwd=home, ranks=2, env={"DDP_HPC_DEADLINE": str(int(time.time()) - 100)})
    assert job.wait() == [2, 2]
    [line] = job.errors()
    assert "DDP_HPC_DEADLINE" in line


@pytest.mark.check
def test_a_job_that_lost_its_directory_ends_and_keeps_the_state(home: Path, forks: Forks) -> None:
    job = forks.start(*ENDLESS, cwd=home, ranks=2)
    _until(lambda: (home / "m.jsonl").exists() and len(trained(home)) > 1)
    (home / "run" / ".lock").write_text('{"nonce": "another", "job": "7"}')
    codes = job.wait()
    assert 0 not in codes
    [line] = job.errors()
    assert "another job has taken over " in line
    assert state_of(home).state == "running", "the state belongs to the other job"


def test_a_run_stops_before_the_allocation_ends(home: Path, forks: Forks) -> None:
    """With the run directory of a job script; the last resort is not reached."""
    options = [*DATA, "--epochs", "100000", "--metrics", "m.jsonl"]
    # The margin is 15 s, so the run stops after 5 s, or after its first steps on a busy machine.
    end_s = time.time() + 20.0
    env = {"DDP_HPC_RUN_DIR": str(home / "run"), "DDP_HPC_DEADLINE": f"{end_s:.2f}"}
    env |= {"DDP_HPC_KILL_DELAY_S": "12"}
    job = forks.start(*options, cwd=home, ranks=2, env=env)
    assert job.wait() == [75, 0], job.words()
    assert time.time() < end_s
    state = state_of(home)
    assert state.state == "requeue"
    assert state.reason.startswith("the job's time limit is near (DDP_HPC_DEADLINE; ")
    assert state.step == trained(home)[-1]["step"]
    assert [path.name for path in (home / "run" / "snapshots").iterdir()] == [f"step_{state.step:08d}"]


def test_a_stuck_rank_reports_an_error_before_the_scheduler_kills_the_job(home: Path, forks: Forks) -> None:
    env = {"PLANT": "stick:1", "DDP_HPC_KILL_DELAY_S": "4"}
    job = forks.start(*ENDLESS, cwd=home, ranks=2, program=PLANTED, env=env)
    _until(lambda: (home / "m.jsonl").exists() and len(trained(home)) == 1)
    os.killpg(job.pids[0], signal.SIGTERM)  # as schedulers do
    began_s = time.monotonic()
    codes = job.wait()
    assert time.monotonic() - began_s < 4
    assert 0 not in codes
    [line] = job.errors()
    assert (
        "did not stop in time: 4 s after SIGTERM, shortly before SIGKILL, it was still starting, "
        "running a step, or saving; its stacks: " in line
    )
    stack = next((home / "run" / "stacks").glob("rank00001*.txt")).read_text()
    assert "planted.py" in stack
    assert "one_step" in stack
    assert state_of(home).state == "failed"


def test_a_rank_whose_agent_of_torchrun_was_killed_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[tuple[object, ...]] = []
    monkeypatch.setattr(session, "_AFTER_AGENT_S", 0.0)
    monkeypatch.setattr(session, "end_before_kill", lambda *end: ends.append(end))
    session._end_after_agent(-1, Parts())
    [(_, _, cause)] = ends
    assert cause is Cause.LOST_RANK, "it is started again in the same job"


def _until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + PATIENCE * 30
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.005)


def _stopping(
    deadline: Deadline | None,
    kill_delay_s: float | None = None,
    rank: int = 0,
    ask: Callable[[], float | None] = lambda: None,
) -> StopRequests:
    return StopRequests(
        OwnRequest(deadline, ask if rank == 0 else None),
        kill_delay_s,
        stacks=None,
        end_before_kill=pytest.fail,
        is_lost=lambda: False,
    )


def test_the_margin_contains_a_save_some_steps_and_the_kill_delay() -> None:
    stopping = _stopping(Deadline(time.time() + 100, "squeue"), 30.0)
    least_s = stopping.margin_s()
    assert 30 < least_s < 35
    stopping.expect_save(10)
    stopping.measured(step_s=2)
    stopping.measured(step_s=1)
    assert stopping.margin_s() == least_s + 15 + 4
    assert stopping.stop_request() == 0
    stopping.measured(save_s=20)  # a measurement replaces the estimate, and the longest one counts
    stopping.measured(save_s=4)
    assert stopping.margin_s() == least_s + 30 + 4
    assert stopping.stop_request() == 0
    stopping.measured(step_s=22)
    assert stopping.stop_request() == TIME_LIMIT
    near = "the job's time limit is near (squeue; stopping 107 s early to save)"
    assert stopping.stop_for(TIME_LIMIT, 0) == Stop(Cause.STOPPED, near)


def test_a_job_that_was_extended_trains_on_until_its_new_end() -> None:
    """The scheduler is asked again shortly before the margin; all ranks take over the answer."""
    asked: list[float] = []
    end_s = time.time() + 20

    def ask() -> float:
        asked.append(time.time())
        return end_s + 3600

    first, other = (_stopping(Deadline(end_s, "qstat"), 10.0, rank, ask) for rank in (0, 1))
    with first, other:
        assert first.stop_request() == 0  # 20 s are left, and the margin is 13 s
        _until(lambda: first.own.deadline_s == end_s + 3600)
        first.measured(step_s=5.0)
        assert (first.stop_request(), len(asked)) == (0, 1)
        assert other.own.deadline_s == end_s
        for one in (first, other):
            one.move_deadline(first.own.deadline_s)
        assert other.own.deadline_s == end_s + 3600
        assert (
            min(*first._last_resort._ends.values(), *other._last_resort._ends.values())
            > time.monotonic() + 3600
        )


def test_a_job_that_was_shortened_stops_earlier() -> None:
    began_s = time.time()
    stopping = _stopping(Deadline(began_s + 30, "qstat"), 10.0, ask=lambda: time.time() + 5)
    assert stopping.stop_request() == 0
    _until(lambda: stopping.stop_request() == TIME_LIMIT)
    assert time.time() < began_s + 10, "the margin of the old end, 13 s, begins later"


def test_the_scheduler_is_not_asked_long_before_the_end() -> None:
    assert _stopping(Deadline(time.time() + 60, "qstat"), 10.0, ask=pytest.fail).stop_request() == 0


def test_only_one_rank_checks_the_deadline() -> None:
    past = Deadline(time.time() - 1, "squeue")
    assert _stopping(past, rank=0).stop_request() == TIME_LIMIT
    assert _stopping(past, rank=1).stop_request() == 0


def test_signal_handlers_of_the_program_are_restored() -> None:
    before = [
        signal.getsignal(sig) for sig in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)
    ]
    with _stopping(None) as stopping:
        signal.raise_signal(signal.SIGUSR2)
        assert stopping.stop_request() == signal.SIGUSR2
        assert stopping.stop_for(stopping.stop_request(), 5).reason == "rank 5 received SIGUSR2"
    assert [signal.getsignal(sig) for sig in STOP_SIGNALS] == before
