"""Which nodes of a job with spare nodes the ranks use."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddp_hpc.schedulers.pbs.running_job import PbsJob
from ddp_hpc.supervisor import spare_nodes
from ddp_hpc.supervisor.spare_nodes import Nodes, NodeWatch

NODES = Nodes(("n1", "n2", "n3"), ("n4", "n5"))


@pytest.mark.parametrize(
    ("lost", "expected"),
    [
        ((), NODES),
        (("n2",), Nodes(("n1", "n4", "n3"), ("n5",))),
        (("n3", "n1"), Nodes(("n4", "n2", "n5"), ())),
        (("n2", "n4"), Nodes(("n1", "n5", "n3"), ())),
        (("n4", "n5"), Nodes(("n1", "n2", "n3"), ())),
        (("n2", "n4", "n5"), None),
    ],
)
def test_each_lost_node_is_replaced_by_the_next_spare_one_that_answers(
    lost: tuple[str, ...], expected: Nodes | None
) -> None:
    assert NODES.without(lost) == expected


def test_the_last_nodes_of_a_job_are_spare() -> None:
    assert Nodes.of(["n1", "n2", "n3", "n4", "n5"], 2) == NODES


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """The nodes that answer, which a test changes."""
    names = {"n1", "n2", "n3"}
    monkeypatch.setattr(spare_nodes, "_EVERY_S", 0.01)
    monkeypatch.setattr(NodeWatch, "_answers", lambda self, name: (name, name in names))
    yield names
    names |= {"n1", "n2", "n3"}


def test_a_node_that_no_longer_answers_is_lost_after_a_while(answering: set[str]) -> None:
    watch = NodeWatch(["n1", "n2", "n3"], 1)
    assert watch.look_again() == []
    answering.remove("n2")
    assert watch.look_again() == ["n2"]
    assert watch.lost() == [], "a few lost packets"
    time.sleep(0.2)
    assert watch.lost(silent_s=0.1) == ["n2"]
    answering.add("n2")
    assert watch.look_again() == []


def test_a_node_that_has_never_answered_is_not_lost(answering: set[str]) -> None:
    assert NodeWatch(["n1", "n2", "behind a firewall"], 1).look_again() == []


def test_if_no_other_node_answers_the_network_of_this_node_is_down(answering: set[str]) -> None:
    watch = NodeWatch(["n1", "n2", "n3"], 1)
    assert watch.look_again() == []
    answering -= {"n2", "n3"}
    assert watch.look_again() == []


def test_a_host_answers_whether_or_not_something_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        assert NodeWatch(["127.0.0.1"], port)._answers("127.0.0.1") == ("127.0.0.1", True)
    assert NodeWatch(["127.0.0.1"], port)._answers("127.0.0.1") == ("127.0.0.1", True)
    assert NodeWatch(["127.0.0.1"], port)._answers("no-such-host.invalid") == ("no-such-host.invalid", False)


def test_under_pbs_mpiexec_gets_a_node_file_with_the_nodes_in_use(tmp_path: Path) -> None:
    """Each node has as many lines as in PBS's own file, also one that replaces the first node."""
    (of_pbs := tmp_path / "of_pbs").write_text("n1.lab\nn1.lab\nn2.lab\nn2.lab\nn3.lab\nn3.lab\n")
    job = PbsJob(str(os.getpid()), {"PBS_NODEFILE": str(of_pbs)})  # without a server that could be asked
    assert job.node_names() == "n1.lab,n2.lab,n3.lab"
    argv, variables = job.on_nodes(["mpiexec", "-n", "4"], ["n3.lab", "n2.lab"], tmp_path)
    assert argv == ["mpiexec", "--hostfile", str(tmp_path / "nodes"), "-n", "4"]
    assert variables == {"PBS_NODEFILE": str(tmp_path / "nodes")}
    assert (tmp_path / "nodes").read_text().split() == ["n3.lab", "n3.lab", "n2.lab", "n2.lab"]
