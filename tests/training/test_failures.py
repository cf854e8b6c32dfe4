"""One rank fails: the whole job ends within seconds, with that rank's error and no other."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from .runs import SMALL, clean_environment, start, train

SIZES = ["--num-samples", "96", "--epochs", "1", "--batch-size", "4", *SMALL]
PLANTED = str(Path(__file__).with_name("planted.py"))


def _run(tmp_path, fault, *options, launcher="mpiexec", ranks=3):
    program = [PLANTED]
    began = time.monotonic()
    done = train(
        *SIZES, *options, cwd=tmp_path, ranks=ranks, launcher=launcher, program=program, env={"PLANT": fault}
    )
    return done, time.monotonic() - began


@pytest.mark.parametrize("launcher", ["mpiexec", "torchrun"])
@pytest.mark.parametrize("rank", [0, 2])
def test_an_exception_in_one_rank_ends_the_job_with_its_traceback_alone(tmp_path, launcher, rank):
    done, took_s = _run(tmp_path, f"raise:{rank}", launcher=launcher)
    assert done.returncode == 1
    assert took_s < 45, "nobody waits for a rank that is gone"
    ours = [line for line in done.stderr.splitlines() if line.startswith("[rank ")]
    assert len(ours) == 1, done.stderr
    assert ours[0].startswith(f"[rank {rank}/3 ")
    assert "ValueError: planted in one rank" in done.stderr


def test_ranks_without_mpi_or_agent_are_ended_too(tmp_path):
    """Started by hand, nothing but our own watch ends the ranks that wait in a collective."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = []
    for rank in range(3):
        env = {"RANK": str(rank), "WORLD_SIZE": "3", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "3"}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PLANT": "raise:1"}
        argv = [sys.executable, PLANTED, *SIZES]
        ranks.append(
            subprocess.Popen(
                argv, cwd=tmp_path, env=clean_environment(env), stderr=subprocess.PIPE, text=True
            )
        )
    errors = [process.communicate(timeout=90)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [1, 1, 1]
    assert "ValueError: planted in one rank" in errors[1]
    assert "Traceback" not in errors[0] + errors[2]


def test_a_killed_rank_ends_the_job(tmp_path):
    done, took_s = _run(tmp_path, "kill:1")
    assert done.returncode != 0
    assert took_s < 45


def test_a_rank_that_hangs_is_waited_for_only_as_long_as_timeout_says(tmp_path):
    done, took_s = _run(tmp_path, "stick:1", "--timeout", "8")
    assert done.returncode == 1
    assert took_s < 60
    assert "another rank" in done.stderr
    assert "--timeout" in done.stderr
    assert "Traceback" not in done.stderr


def test_ctrl_c_ends_all_ranks_with_130_and_no_traceback(tmp_path):
    env = clean_environment({"PYTHONUNBUFFERED": "1"})
    argv = [*start(2), "-m", "ddp_hpc.train", *SIZES, "--epochs", "10000"]
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
        os.killpg(job.pid, signal.SIGINT)
        _, err = job.communicate(timeout=30)
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
    assert "Traceback" not in err
    assert job.returncode != 0
    left = subprocess.run(["pgrep", "-s", str(job.pid)], capture_output=True, text=True)
    assert left.stdout.strip() == ""
