"""One rank fails: the whole job ends within seconds, with that rank's error and no other."""

import os
import re
import signal
import subprocess
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from ddp_hpc.base.attempt_end import read_end
from ddp_hpc.base.run_outcomes import Cause
from tests.conftest import clean_environ

from .runs import LINEAR, run, start, train

SIZES = ["--num-samples", "96", "--epochs", "1", "--batch-size", "4", *LINEAR]
SAVING = ["--snapshot-dir", "run", "--snapshot-every-steps", "1"]
ATTEMPT = "1 7"
PLANTED, MODULE = str(Path(__file__).with_name("planted.py")), "tests.training.planted"


def _run(tmp_path, fault, *options, launcher="mpiexec", ranks):
    program = [PLANTED]
    began = time.monotonic()
    done = train(
        *SIZES, *options, cwd=tmp_path, ranks=ranks, launcher=launcher, program=program, env={"PLANT": fault}
    )
    return done, time.monotonic() - began


def _assert_one_exception(done, took_s, rank, ranks):
    assert done.returncode == 1
    assert took_s < 45, "no rank waits for a lost one"
    ours = [line for line in done.stderr.splitlines() if line.startswith("[rank ")]
    assert len(ours) == 1, done.stderr
    assert ours[0].startswith(f"[rank {rank}/{ranks} ")
    assert "ValueError: planted in one rank" in done.stderr


@pytest.fixture(scope="module")
def failed_while_saving(tmp_path_factory):
    """A run under mpiexec, in which rank 1 raised an exception while rank 0 wrote a snapshot."""
    home = tmp_path_factory.mktemp("failed")
    done, took_s = _run(home, "while_saving:1", *SAVING, ranks=2)
    return home, done, took_s


def _assert_one_whole_snapshot(home):
    assert [path.name for path in (home / "run").glob("step_*")] == ["step_00000001"]
    assert not list((home / "run").glob(".*partial*"))


def test_the_snapshot_that_is_being_written_when_another_rank_fails_is_completed(failed_while_saving):
    home, done, _ = failed_while_saving
    assert done.returncode == 1
    _assert_one_whole_snapshot(home)


@pytest.mark.check
def test_the_snapshot_that_the_failing_rank_is_writing_is_completed(tmp_path, forks):
    job = _forked(forks, tmp_path, "while_saving:0", *SAVING, ranks=2)
    assert job.wait() == [1, 1], job.words()
    _assert_one_whole_snapshot(tmp_path)


def test_under_mpiexec_only_the_exception_of_the_failed_rank_is_printed(failed_while_saving):
    _, done, took_s = failed_while_saving
    _assert_one_exception(done, took_s, 1, 2)


# Ranks without MPI, agent or srun, which would end the others.


def _forked(forks, tmp_path, fault, *options, ranks=3):
    env = {"PLANT": fault, "DDP_HPC_RUN_DIR": str(tmp_path / "run"), "DDP_HPC_THIS_ATTEMPT": ATTEMPT}
    return forks.start(*SIZES, *options, cwd=tmp_path, ranks=ranks, program=MODULE, env=env)


def _assert_recorded(tmp_path, **expected):
    """Checks the record of the end, which the supervisor and `ddp-hpc status` read."""
    end = asdict(read_end(tmp_path / "run", ATTEMPT))
    assert {name: end[name] for name in expected} == expected


def _without_progress(job):
    """The output of all ranks without the lines of a normal run."""
    fine = ("world: ", "placement: ", "made ", "making ", "data: ", "model: ", "epoch ")
    return [line for line in job.words().splitlines() if not line.startswith(fine)]


@pytest.mark.parametrize("fault", [pytest.param("raise:0", marks=pytest.mark.check), "raise:1", "pick:1"])
def test_ranks_without_mpi_or_an_agent_are_ended(tmp_path, forks, fault):
    job = _forked(forks, tmp_path, fault)
    assert job.wait() == [1, 1, 1]
    (line,) = _without_progress(job)
    assert line.startswith(f"[rank {fault[-1]}/3 ")
    assert "Error: planted " in line
    exception = "RuntimeError" if fault == "pick:1" else "ValueError"
    rank = int(fault[-1])
    _assert_recorded(tmp_path, cause=Cause.FAILED, exit_code=1, rank=rank, exception=exception)


def test_a_rank_that_is_out_of_memory_is_reported_with_an_advice_and_saves_nothing(tmp_path, forks):
    job = _forked(forks, tmp_path, "out_of_memory:1", *SAVING)
    assert job.wait() == [1, Cause.OUT_OF_MEMORY.exit_code, 1], job.words()
    (line,) = job.errors()
    assert line.startswith("[rank 1/3 ")
    assert "OutOfMemoryError: CUDA out of memory" in line
    assert Cause.OUT_OF_MEMORY.advice in line
    _assert_recorded(tmp_path, cause=Cause.OUT_OF_MEMORY, exit_code=78, rank=1, exception="OutOfMemoryError")
    _assert_one_whole_snapshot(tmp_path)
    assert (tmp_path / "run" / "state").read_text().startswith("failed ")


def test_a_rank_that_dies_in_a_sharded_save_ends_the_run_at_once_with_the_older_snapshot(tmp_path, forks):
    job = _forked(forks, tmp_path, "die_in_save:1", *SAVING, "--strategy", "fsdp")
    codes = job.wait()
    assert time.time() - (tmp_path / "died").stat().st_mtime < 10
    assert codes == [1, -9, 1], job.words()
    (line,) = job.errors()
    assert "rank 1" in line
    assert "the snapshot of step 2 was NOT saved" in job.words()
    assert "rank 1 did not write its part before a rank was lost" in job.words()
    _assert_one_whole_snapshot(tmp_path)


def test_a_rank_that_calls_exit_is_reported(tmp_path, forks):
    job = _forked(forks, tmp_path, "exit:1")
    assert job.wait() == [1, 3, 1]
    (line,) = _without_progress(job)
    assert line.startswith("[rank 1/3 ")
    assert "exit code 3" in line
    _assert_recorded(tmp_path, cause=Cause.FAILED, exit_code=3, rank=1)


def test_ranks_that_are_stuck_when_rank_0_dies_are_ended_with_one_line(tmp_path, forks):
    job = _forked(forks, tmp_path, "stuck_others:0")
    assert job.wait() == [-9, 1, 1]
    (line,) = job.errors()
    assert "rank 0 is gone" in line


def test_a_killed_rank_is_named(tmp_path, forks):
    job = _forked(forks, tmp_path, "kill:1")
    assert job.wait() == [1, -9, 1]
    (line,) = job.errors()
    assert "rank 1 on " in line
    _assert_recorded(tmp_path, cause=Cause.LOST_RANK, exit_code=1)


@pytest.mark.parametrize("times", [3, pytest.param(100, marks=pytest.mark.soak)])
def test_an_error_on_all_ranks_ends_all_with_the_same_code(tmp_path, forks, times):
    """Threads that still wait at the exit can cause SIGABRT, but only sometimes."""
    for _ in range(times):
        job = _forked(forks, tmp_path, "none:0", "--data", "nope.h5")
        assert job.wait() == [2, 2, 2], job.words()
        (line,) = _without_progress(job)
        assert "error: " in line


@pytest.mark.soak
def test_a_rank_that_is_slow_to_end_does_not_turn_success_into_failure(tmp_path, forks):
    job = _forked(forks, tmp_path, "slow_end:2")
    assert job.wait() == [0, 0, 0], job.words()
    assert job.errors() == []


@pytest.mark.check
def test_torchrun_restarts_failed_ranks_from_the_newest_snapshot(tmp_path):
    """The agent's store keeps the addresses of the earlier ranks, which new workers must not use."""
    argv = [*start(2, "torchrun"), "--max-restarts=1", PLANTED, *SIZES, *SAVING, "--summary", "s.json"]
    done = run(argv, tmp_path, env={"PLANT": "once:0"})  # the rank that saves, and has completed a save
    assert done.returncode == 0, done.stderr
    (ours,) = [line for line in done.stderr.splitlines() if line.startswith("[rank ")]
    assert ours.startswith("[rank 0/2 ")
    assert "ValueError: planted in one rank" in done.stderr
    assert "resuming after step 1 " in done.stdout
    assert (tmp_path / "s.json").exists()


@pytest.mark.check
def test_a_killed_rank_ends_the_job(tmp_path):
    done, took_s = _run(tmp_path, "kill:1", ranks=2)
    assert done.returncode != 0
    assert took_s < 45


@pytest.mark.check
def test_a_stopped_rank_is_named(tmp_path):
    # This test needs mpiexec, which kills the stopped process at the end.
    done, _ = _run(tmp_path, "stop:2", "--hang-timeout", "6", ranks=3)
    assert done.returncode != 0
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("[rank ")]
    assert re.search(r"rank 2 on \S+ has been .*no answer: its process is stopped", line), line


@pytest.mark.check
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_exits_with_0_in_the_middle_is_named_and_fails_the_job(tmp_path, rank):
    # Hydra kills the other ranks when it notices such an exit, and returns 0.
    done, _ = _run(tmp_path, f"leave:{rank}", *SAVING, ranks=2)
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("[rank ")]
    assert f"error: rank {rank} on " in line
    assert not (tmp_path / "run" / "state").read_text().startswith(("done", "running"))


def test_a_hanging_rank_is_waited_for_only_until_the_timeout(tmp_path, forks):
    job = _forked(forks, tmp_path, "stick:1", "--timeout", "3")
    began_s = time.monotonic()
    assert job.wait() == [1, 1, 1]
    assert time.monotonic() - began_s < 30
    (line,) = _without_progress(job)
    assert "another rank" in line
    assert "--timeout" in line


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_does_not_interrupt_the_report_of_a_failure(tmp_path, forks, signum):
    job = _forked(forks, tmp_path, f"raise:1:{signum.name}", ranks=2)
    assert job.wait() == [1, 1]
    (line,) = _without_progress(job)
    assert "ValueError: planted in one rank" in line


@pytest.mark.check
@pytest.mark.parametrize(
    ("signum", "options"),
    [
        (signal.SIGINT, []),
        (signal.SIGTERM, ["--workers", "1"]),
    ],
)
def test_a_signal_ends_all_ranks_and_their_workers_without_a_traceback(tmp_path, signum, options):
    env = clean_environ({"PYTHONUNBUFFERED": "1"})
    argv = [*start(2), "-m", "ddp_hpc.train", *SIZES, "--epochs", "10000", *options]
    job = subprocess.Popen(
        argv,
        cwd=tmp_path,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert job.stdout is not None
        while "step" not in (line := job.stdout.readline()):
            assert line, "ended before its first step"
        os.killpg(job.pid, signum)
        _, err = job.communicate(timeout=30)
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
    assert "Traceback" not in err
    assert job.returncode != 0
    left = subprocess.run(["pgrep", "-s", str(job.pid)], capture_output=True, text=True)
    assert left.stdout.strip() == ""
