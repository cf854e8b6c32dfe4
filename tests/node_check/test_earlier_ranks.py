"""The check of nodes ends the processes of earlier starts in the same job."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from ddp_hpc.node_check import earlier_ranks
from ddp_hpc.node_check.earlier_ranks import end_earlier_ranks
from ddp_hpc.node_check.results import EARLIER, Problem, RankResult, Results
from ddp_hpc.node_check.verdict import judge

IGNORES_SIGTERM = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(600)
"""
Start = Callable[[str], "subprocess.Popen[str]"]
# Other test processes on this machine must not end the processes of this one.
JOB = f"test-{os.getpid()}"


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a process of a launch, which ignores SIGTERM."""
    started = []

    def one(launch: str) -> subprocess.Popen[str]:
        environ = {**os.environ, "DDP_HPC_LAUNCH": launch}
        argv = [sys.executable, "-c", IGNORES_SIGTERM]
        process = subprocess.Popen(argv, env=environ, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    yield one
    for process in started:
        process.kill()
        process.wait(10)
        assert process.stdout is not None
        process.stdout.close()


def test_only_processes_of_earlier_starts_are_ended(start: Start) -> None:
    """A launch of another job of this user on the same node is left alone."""
    first, second, other = start(f"{JOB}-1"), start(f"{JOB}-2"), start(f"other-{JOB}")
    assert end_earlier_ranks({"DDP_HPC_EARLIER_LAUNCHES": f"{JOB}-1 {JOB}-2"}) == ""
    assert (first.wait(10), second.wait(10)) == (-9, -9)
    assert other.poll() is None


def test_before_the_first_start_nothing_is_ended(start: Start) -> None:
    process = start(JOB)
    assert end_earlier_ranks({"DDP_HPC_LAUNCH": JOB, "DDP_HPC_EARLIER_LAUNCHES": ""}) == ""
    assert process.poll() is None


def test_a_process_that_does_not_end_is_named(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    process = start(f"{JOB}-1")
    monkeypatch.setattr(earlier_ranks, "send", lambda *_: None)
    said = end_earlier_ranks({"DDP_HPC_EARLIER_LAUNCHES": f"{JOB}-1"}, limit_s=0.0)
    assert said == f"process {process.pid} of an earlier start of the ranks could not be killed"


@pytest.mark.parametrize(
    ("world_size", "kind", "is_complete"),
    [(2, "clock", True), (2, EARLIER, False), (3, "clock", False)],
)
def test_a_check_without_all_ranks_does_not_prove_that_no_earlier_process_is_left(
    world_size: int, kind: str, is_complete: bool
) -> None:
    problem = Problem(kind, "why")
    ranks = (
        RankResult(rank=0, host="n1", local_size=1),
        RankResult(rank=1, host="n2", local_size=1, problems=(problem,)),
    )
    assert judge(Results(world_size=world_size, ranks=ranks), ["n1", "n2"]).is_complete == is_complete
