"""Which nodes of a job with spare nodes the ranks use."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ddp_hpc.base.errors import RequestError
from ddp_hpc.queue.failed_nodes import failed_nodes, record_failed_node
from ddp_hpc.schedulers.pbs.running_job import PbsJob
from ddp_hpc.schedulers.run_command import Answer, NoAnswerError
from ddp_hpc.schedulers.slurm.running_job import SlurmJob
from ddp_hpc.supervisor import guard, spare_nodes
from ddp_hpc.supervisor.spare_nodes import NodePool, Nodes, NodeWatch

NODES = Nodes(("n1", "n2", "n3"), ("n4", "n5"))


@pytest.mark.parametrize(
    ("lost", "least", "expected"),
    [
        ((), 3, NODES),
        (("n2",), 3, Nodes(("n1", "n4", "n3"), ("n5",))),
        (("n3", "n1"), 3, Nodes(("n4", "n2", "n5"), ())),
        (("n2", "n4"), 3, Nodes(("n1", "n5", "n3"), ())),
        (("n4", "n5"), 3, Nodes(("n1", "n2", "n3"), ())),
        (("n2", "n4", "n5"), 3, None),
        (("n2",), 2, Nodes(("n1", "n4", "n3"), ("n5",))),
        (("n1", "n3", "n4"), 2, Nodes(("n5", "n2"), ())),
        (("n1", "n2", "n4", "n5"), 2, None),
    ],
)
def test_each_lost_node_is_replaced_by_a_spare_one_that_answers_or_left_out(
    lost: tuple[str, ...], least: int, expected: Nodes | None
) -> None:
    assert NODES.without(lost, least) == expected


def test_the_last_nodes_of_a_job_are_spare() -> None:
    assert Nodes.of(["n1", "n2", "n3", "n4", "n5"], 2) == NODES


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """The nodes that answer, which a test changes."""
    names = {"n1", "n2", "n3"}
    monkeypatch.setattr(spare_nodes, "_EVERY_S", 0.01)
    monkeypatch.setattr(spare_nodes, "_ANSWER_S", 0.2)
    monkeypatch.setattr(spare_nodes, "_LOST_AFTER_S", 0.02)
    monkeypatch.setattr(NodeWatch, "_answers", lambda self, name: (name, name in names))
    yield names
    names |= {"n1", "n2", "n3"}


def test_a_node_that_no_longer_answers_is_lost_after_a_while(answering: set[str]) -> None:
    watch = NodeWatch(["n1", "n2", "n3"])
    assert watch.look_again() == []
    answering.remove("n2")
    assert watch.look_again() == ["n2"]
    assert watch.lost() == [], "a few lost packets"
    time.sleep(0.2)
    assert watch.lost(silent_s=0.1) == ["n2"]
    assert watch.silent_s("n2") > 0.2
    answering.add("n2")
    assert watch.look_again() == []


def test_a_node_that_answers_again_after_a_missed_connection_is_not_lost(
    answering: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = NodeWatch(["n1", "n2", "n3"])
    assert watch.look_again() == []
    num_missed = 2

    def miss(self: NodeWatch, name: str) -> tuple[str, bool]:
        nonlocal num_missed
        num_missed -= name == "n2"
        return name, name != "n2" or num_missed < 0

    monkeypatch.setattr(spare_nodes, "_LOST_AFTER_S", 60.0)
    monkeypatch.setattr(NodeWatch, "_answers", miss)
    assert watch.look_again() == []
    assert num_missed < 0, "it was asked until it answered"


def test_a_node_that_has_never_answered_is_not_lost_but_named(
    answering: set[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert NodeWatch(["n1", "n2", "behind a firewall"]).look_again() == []
    assert (
        "no answer yet from behind a firewall; the loss of a node that has never answered cannot be detected"
        in capfd.readouterr().out
    )


@pytest.mark.parametrize("is_connected", [True, False])
def test_if_no_other_node_answers_the_network_of_this_node_can_be_down(
    answering: set[str], is_connected: bool
) -> None:
    watch = NodeWatch(["n1", "n2", "n3"], is_connected=lambda: is_connected)
    assert watch.look_again() == []
    answering -= {"n2", "n3"}
    assert watch.look_again() == (["n2", "n3"] if is_connected else [])


def test_if_the_network_of_this_node_comes_back_no_node_is_lost(answering: set[str]) -> None:
    is_asked = threading.Event()

    def ask() -> bool:
        is_asked.set()
        return "n2" in answering

    watch = NodeWatch(["n1", "n2", "n3"], is_connected=ask)
    assert watch.look_again() == []
    answering -= {"n2", "n3"}
    assert is_asked.wait(20)
    time.sleep(0.2)
    answering |= {"n2", "n3"}
    assert watch.look_again() == []
    assert watch.lost(silent_s=0.1) == []


def test_a_node_that_was_left_out_is_not_asked_again(
    answering: set[str], capfd: pytest.CaptureFixture[str]
) -> None:
    pool = NodePool(["n1", "n2", "n3"], 0, min_nodes=2, is_connected=lambda: True)
    assert pool.replace_bad("") == ""
    answering.remove("n2")
    assert pool.replace_bad("") == ""
    assert pool.nodes == Nodes(("n1", "n3"), ())
    line = "no answer from n2; the ranks use 2 nodes instead of 3 (--min-nodes)"
    assert line in capfd.readouterr().out
    assert pool._watch.look_again() == []
    answering.remove("n3")
    assert pool.replace_bad("") == "no answer from n3; too few nodes are left"


def test_a_host_answers_whether_or_not_something_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        assert NodeWatch(["127.0.0.1"], [port])._answers("127.0.0.1") == ("127.0.0.1", True)
    assert NodeWatch(["127.0.0.1"], [port])._answers("127.0.0.1") == ("127.0.0.1", True)
    assert NodeWatch(["127.0.0.1"])._answers("no-such-host.invalid") == ("no-such-host.invalid", False)


def test_in_a_rehearsal_a_directory_says_which_nodes_are_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DDP_HPC_DOWN_NODES", str(tmp_path))
    monkeypatch.setattr(spare_nodes, "_EVERY_S", 0.01)
    watch = NodeWatch(["node1", "node2", "node3"])
    assert watch.look_again() == []
    assert capfd.readouterr().out == ""
    (tmp_path / "node2").touch()
    watch.ask_again()
    assert watch.lost(silent_s=0.0) == ["node2"]


def test_a_name_server_that_fails_later_costs_no_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spare_nodes, "_EVERY_S", 3600.0)
    watch, resolve = NodeWatch(["localhost"]), socket.getaddrinfo
    assert watch._answers("localhost") == ("localhost", True)

    def fail(host: str, *options: Any, **others: Any) -> Any:
        if host == "localhost":
            raise socket.gaierror
        return resolve(host, *options, **others)

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    assert watch._answers("localhost") == ("localhost", True)


def test_without_a_node_for_the_ranks_the_job_is_refused() -> None:
    with pytest.raises(RequestError, match="this job has only 2 nodes; request more nodes"):
        NodePool(["n1", "n2"], 2)


def test_the_guard_runs_on_the_last_node_that_answers(answering: set[str]) -> None:
    pool = NodePool(["n1", "n2", "n3"], 1)
    assert pool._watch.look_again() == []
    assert pool.node_of_guard == "n3"
    answering.remove("n3")
    while not pool._watch.lost(silent_s=0.0):
        time.sleep(0.01)
    pool._watch.lost = lambda: ["n3"]  # type: ignore[method-assign]
    assert pool.node_of_guard == "n2"
    pool._watch.lost = lambda: ["n2", "n3"]  # type: ignore[method-assign]
    assert pool.node_of_guard == ""


# The guard


class Slurm:
    """Slurm's answers to the guard, and its requests. Without `is_connected`, it does not answer."""

    def __init__(self, requeue: Answer) -> None:
        self.requeue, self.requests, self.is_connected = requeue, list[str](), True

    def request(self, *argv: str) -> Answer:
        if not self.is_connected:
            self.requests.append("no answer")
            raise NoAnswerError("x")
        self.requests.append(" ".join(argv))
        return self.requeue if argv[1] == "requeue" else Answer(0, "", "")


def guard_of(slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> threading.Thread:
    monkeypatch.setattr(guard, "ask", slurm.request)
    monkeypatch.setattr(guard, "submit", slurm.request)
    monkeypatch.setattr(guard, "_SILENT_S", 0.1)
    monkeypatch.setattr(guard, "_EVERY_S", 0.01)
    thread = threading.Thread(target=guard.main, args=("n1", "7"), daemon=True)
    thread.start()
    time.sleep(0.2)
    return thread


@pytest.mark.parametrize(
    ("answer", "then"),
    [
        (Answer(0, "", ""), []),
        (Answer(1, "", "Job is pending execution for job 7"), []),
        (Answer(1, "", "Access/permission denied for job 7"), ["scancel 7"]),
    ],
)
def test_the_guard_requeues_a_job_whose_first_node_has_died(
    answering: set[str], monkeypatch: pytest.MonkeyPatch, answer: Answer, then: list[str]
) -> None:
    thread = guard_of(slurm := Slurm(answer), monkeypatch)
    assert not slurm.requests
    answering.remove("n1")
    thread.join(20)
    assert slurm.requests == ["scontrol show job 7", "scontrol requeue 7", *then]


def test_the_guard_leaves_the_job_alone_if_its_own_node_was_disconnected(
    answering: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm = Slurm(Answer(0, "", ""))
    slurm.is_connected = False
    thread = guard_of(slurm, monkeypatch)
    answering.remove("n1")
    while not slurm.requests:
        time.sleep(0.01)
    answering.add("n1")
    slurm.is_connected = True
    time.sleep(0.5)
    assert thread.is_alive()
    assert {*slurm.requests} <= {"no answer", "scontrol show job 7"}


def test_a_signal_for_the_ranks_does_not_end_the_guard_before_sigterm() -> None:
    """`scancel --signal=USR1 JOB` also reaches the guard."""
    with subprocess.Popen([sys.executable, "-m", "ddp_hpc.supervisor.guard", "localhost", "7"]) as process:
        for _ in range(400):  # until it has started
            if is_ignored(process.pid, signal.SIGUSR1):
                break
            time.sleep(0.05)
        process.send_signal(signal.SIGUSR1)
        time.sleep(0.2)
        assert process.poll() is None
        process.terminate()
        assert process.wait(20) == -signal.SIGTERM


def is_ignored(pid: int, number: int) -> bool:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return bool(int(status["SigIgn"], 16) >> (number - 1) & 1)


def test_under_pbs_mpiexec_gets_a_node_file_with_the_nodes_in_use(tmp_path: Path) -> None:
    """Each node has as many lines as in PBS's own file, also one that replaces the first node."""
    (of_pbs := tmp_path / "of_pbs").write_text("n1.lab\nn1.lab\nn2.lab\nn2.lab\nn3.lab\nn3.lab\n")
    job = PbsJob(str(os.getpid()), {"PBS_NODEFILE": str(of_pbs)})  # without a server that could be asked
    assert job.node_names() == "n1.lab,n2.lab,n3.lab"
    line = ["mpiexec", "-n", "4", "-ppn", "2", "python", "train.py", "-n", "4"]
    argv, variables = job.on_nodes(line, ["n3.lab", "n2.lab"], 2, tmp_path)
    assert argv == ["mpiexec", "--hostfile", str(tmp_path / "nodes"), *line[1:]]
    assert variables == {"PBS_NODEFILE": str(tmp_path / "nodes")}
    assert (tmp_path / "nodes").read_text().split() == ["n3.lab", "n3.lab", "n2.lab", "n2.lab"]
    argv, _ = job.on_nodes(line, ["n3.lab"], 2, tmp_path)
    assert argv[3:] == ["-n", "2", *line[3:]]


def test_srun_gets_the_numbers_of_nodes_and_ranks_that_are_left(tmp_path: Path) -> None:
    job = SlurmJob(str(os.getpid()), {})
    line = ["srun", "--nodes=4", "--ntasks=16", "--ntasks-per-node=4", "./program", "--nodes=4"]
    argv, _ = job.on_nodes(line, ["n1", "n2", "n4"], 4, tmp_path)
    assert argv == ["srun", "--nodelist=n1,n2,n4", "--overlap", "--nodes=3", "--ntasks=12", *line[3:]]


@pytest.mark.parametrize("words", [["-N4", "-n16"], ["--nodes=all", "--ntasks=16"], ["--nodes"]])
def test_a_launch_line_without_these_numbers_is_refused(words: list[str], tmp_path: Path) -> None:
    job = SlurmJob(str(os.getpid()), {})
    with pytest.raises(RequestError, match="the launch line lacks --nodes and a number"):
        job.on_nodes(["srun", *words], ["n1"], 4, tmp_path)


def test_nodes_that_have_failed_in_earlier_jobs_become_spare_and_the_log_says_so(
    answering: set[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    record_failed_node(tmp_path, "n1", "no answer")
    assert NodePool(["n1", "n2", "n3"], 1, run_dir=tmp_path).nodes == Nodes(("n2", "n3"), ("n1",))
    line = "ddp-hpc: not used, because they have failed in this run: n1; 0 spare nodes left\n"
    assert capfd.readouterr().out == line


def test_a_bad_node_is_replaced_and_recorded(
    answering: set[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pool = NodePool(["n1", "n2", "n3"], 1, run_dir=tmp_path)
    assert pool.replace({"n2": "GPU 1 failed"}) == ""
    assert pool.nodes == Nodes(("n1", "n3"), ())
    assert "ddp-hpc: node n2: GPU 1 failed; replaced by n3\n" in capfd.readouterr().out
    assert pool.replace({"n1": "no GPUs found"}) == "node n1: no GPUs found; too few nodes are left"
    assert [(each.node, each.reason) for each in failed_nodes(tmp_path)] == [
        ("n2", "GPU 1 failed"),
        ("n1", "no GPUs found"),
    ]


def test_a_silent_node_and_one_with_two_failures_are_recorded(answering: set[str], tmp_path: Path) -> None:
    pool = NodePool(["n1", "n2", "n3"], 1, run_dir=tmp_path)
    assert pool._watch.look_again() == []
    assert pool.replace_bad("n2") == ""
    assert [(each.node, each.reason) for each in failed_nodes(tmp_path)] == [
        ("n2", "two attempts have failed on it")
    ]
