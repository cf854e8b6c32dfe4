"""Several nodes of a job, simulated by processes with Slurm's variables; some are missing or differ."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path

import pytest

from ddp_hpc.doctor.check_result import Result
from ddp_hpc.doctor.compare_nodes import differences
from ddp_hpc.doctor.node_exchange import Place, answer, ask, exchange_directory, gather, place_of
from ddp_hpc.doctor.run_in_child import collect, start
from tests.conftest import Launch


def step(node: int, num_nodes: int = 3, **more: str) -> dict[str, str]:
    """Returns the variables that srun sets for the only task on a node of job 7."""
    return {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(node),
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": str(node),
        "SLURM_STEP_NUM_TASKS": str(num_nodes),
        "SLURM_STEP_NUM_NODES": str(num_nodes),
        "SLURM_STEP_TASKS_PER_NODE": f"1(x{num_nodes})",
        "SLURM_STEP_NODELIST": f"n[1-{num_nodes}]",
        **more,
    }


def argv(*more: str) -> list[str]:
    checks = ("--only", "python", "--only", "threads", "--only", "work-space")
    return [sys.executable, "-m", "ddp_hpc", "doctor", *checks, *more]


def test_identical_nodes_have_no_differences(launch: Launch, tmp_path: Path) -> None:
    nodes = [launch.start(argv(), env=step(n), cwd=tmp_path) for n in (1, 2, 0)]
    others, first = [launch.end(node) for node in nodes[:2]], launch.end(nodes[2])
    assert [line.split()[:2] for line in first.stdout.splitlines()] == [["ok", "shared-folder"]]
    assert first.stderr == "3 of 3 nodes, 3 checks per node; differences: 1 ok, 0 warn, 0 fail\n"
    assert [first.exit_code, *(node.exit_code for node in others)] == [0, 0, 0]
    assert "".join(node.stdout + node.stderr for node in others) == ""
    assert not list(tmp_path.iterdir()), "the directory of the exchange is removed"


def test_only_a_node_that_differs_is_listed(launch: Launch, tmp_path: Path) -> None:
    odd = {"OMP_NUM_THREADS": "100000"}
    nodes = [launch.start(argv(), env=step(n, **(odd if n == 1 else {})), cwd=tmp_path) for n in range(3)]
    first, *_ = [launch.end(node) for node in nodes]
    (line,) = first.stdout.splitlines()[1:]
    assert line.startswith("warn  threads         n2: OMP_NUM_THREADS=100000 on ")
    assert "(other nodes: OMP_NUM_THREADS is not set" in line
    assert first.exit_code == 0


def test_a_node_that_does_not_answer_is_reported_after_the_wait(launch: Launch, tmp_path: Path) -> None:
    nodes = [launch.start(argv("--wait-s", "2", "--json"), env=step(n), cwd=tmp_path) for n in (0, 1)]
    first, second = (launch.end(node) for node in nodes)
    report = json.loads(first.stdout)
    (shared,) = report["results"]
    assert shared["status"] == "fail"
    assert shared["what"] == f"n3 did not respond to the file that n1 wrote to {tmp_path} within 2 s"
    assert sorted(report["nodes"]) == ["n1", "n2"]
    assert (first.exit_code, second.exit_code) == (1, 0)
    assert first.wall_s < 20
    assert not list(tmp_path.iterdir())


def test_a_directory_that_is_not_shared_is_reported_by_both_nodes(launch: Launch, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    env = [step(0, 2, DDP_HPC_RUN_DIR=str(tmp_path / "a")), step(1, 2, DDP_HPC_RUN_DIR=str(tmp_path / "b"))]
    first, second = [launch.end(p) for p in [launch.start(argv("--wait-s", "1"), env=e) for e in env]]
    assert f"n2 did not respond to the file that n1 wrote to {tmp_path / 'a'} within 1 s" in first.stdout
    assert f"[n2] error: found no file of n1 in {tmp_path / 'b'} (waited 1 s)" in second.stderr
    assert "--shared DIR" in second.stderr
    assert (first.exit_code, second.exit_code) == (1, 1)


def test_a_shared_directory_that_is_not_writable_fails_at_once(launch: Launch, tmp_path: Path) -> None:
    ended = launch(argv("--shared", str(tmp_path / "none"), "--wait-s", "60"), env=step(0, 2))
    assert "fail  shared-folder   n1 cannot exchange files in" in ended.stdout
    assert "No such file or directory" in ended.stdout
    assert ended.exit_code == 1
    assert ended.wall_s < 10


def test_a_second_rank_on_a_node_does_nothing(launch: Launch) -> None:
    ended = launch(argv(), env=step(0, 2) | {"SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"})
    assert (ended.exit_code, ended.stdout, ended.stderr) == (0, "", "")


PLACE = Place("7-0", num_nodes=3, hosts=("n1", "n2", "n3"))
GOOD = Result("shm", "ok", "8 GiB", "", "ok 8 GiB")
RUN_ID = "0123456789abcdef"


def write_answer(directory: Path, node: int, content: object) -> None:
    (directory / f"results-{RUN_ID}-{node}").write_text(
        content if isinstance(content, str) else json.dumps(content)
    )


@pytest.mark.parametrize(
    "garbage",
    [
        "",
        "{",
        "[]",
        {"results": 3},
        {"results": [{"name": "shm"}]},
        {"results": [asdict(GOOD) | {"status": "fine"}]},
        {"results": [asdict(GOOD) | {"more": ""}]},
    ],
)
def test_an_invalid_answer_is_ignored(tmp_path: Path, garbage: object) -> None:
    directory = exchange_directory(tmp_path, PLACE)
    ask(directory, RUN_ID)
    write_answer(directory, 1, garbage)
    write_answer(directory, 2, {"results": [asdict(GOOD)]})
    assert gather(directory, RUN_ID, PLACE, 0.3) == {2: [GOOD]}


def test_files_of_an_earlier_run_are_ignored(tmp_path: Path) -> None:
    directory = exchange_directory(tmp_path, PLACE)
    ask(directory, "f" * 16)
    (directory / f"results-{'f' * 16}-1").write_text(json.dumps({"results": [asdict(GOOD)]}))
    ask(directory, RUN_ID)
    assert [path.name for path in directory.iterdir()] == ["question"]


def test_nodes_keep_waiting_after_the_question_of_a_crashed_first_node(tmp_path: Path) -> None:
    directory = tmp_path / "exchange"
    ask(directory, "f" * 16)
    second = start(lambda: answer(directory, 1, [GOOD], 20.0), 30.0)
    end_s = time.monotonic() + 10
    while not (directory / f"results-{'f' * 16}-1").exists() and time.monotonic() < end_s:
        time.sleep(0.02)
    shutil.rmtree(directory)  # as the first node of the next run does
    time.sleep(0.5)
    ask(directory, RUN_ID)
    assert gather(directory, RUN_ID, Place("7-0", num_nodes=2), 10.0) == {1: [GOOD]}
    assert collect(second) is True


def result(name: str, status: str, what: str) -> Result:
    return Result(name, status, what, "fix it", f"{status} {what}")


def test_a_problem_of_all_nodes_is_one_line() -> None:
    node = [result("torch", "fail", "not installed")]
    (line,) = differences({"n1": node, "n2": node, "n3": node})
    assert (line.status, line.what) == ("fail", "all 3 nodes: not installed")


def test_different_versions_are_a_warning_even_if_both_are_ok() -> None:
    new, old = [result("torch", "ok", "torch 2.8")], [result("torch", "ok", "torch 2.7")]
    (line,) = differences({"n1": old, "n2": new, "n3": new})
    assert (line.status, line.what) == ("warn", "n1: torch 2.7 (other nodes: torch 2.8)")


def test_of_two_equal_groups_the_better_one_is_the_majority() -> None:
    (line,) = differences({"n1": [result("shm", "fail", "full")], "n2": [result("shm", "ok", "free")]})
    assert (line.status, line.what) == ("fail", "n1: full (other nodes: free)")


def test_a_bad_majority_and_a_good_node_are_both_listed() -> None:
    bad, good = [result("shm", "fail", "full")], [result("shm", "ok", "free")]
    lines = differences({"n1": bad, "n2": bad, "n3": good})
    assert [line.what for line in lines] == ["2 of 3 nodes: full", "n3: free (other nodes: full)"]


def test_a_node_that_ran_other_checks_is_listed() -> None:
    (line,) = differences({"n1": [GOOD], "n2": [GOOD], "n3": []})
    assert (line.status, line.what) == ("fail", "n3: did not run this check (other nodes: 8 GiB)")


def test_only_some_of_many_differing_nodes_are_listed() -> None:
    nodes = {f"n{i}": [result("shm", "ok", "free" if i > 8 else "odd")] for i in range(1, 30)}
    (line,) = differences(nodes)
    assert line.what.startswith("n1, n2, n3, n4, n5 and 3 more: odd")


def test_the_place_in_a_slurm_job() -> None:
    place = place_of(step(1))
    assert place == Place("7-0", 0, 1, 1, 3, ("n1", "n2", "n3"))


def test_one_process_and_contradictions_have_no_place() -> None:
    assert place_of({}) is None
    assert place_of(step(0) | {"SLURM_PROCID": "9"}) is None


@pytest.mark.parametrize(("hosts", "node_rank"), [("other here other here", 1), ("a b", None)])
def test_the_node_of_hydra_in_a_pbs_job_is_found_in_the_node_file(
    tmp_path: Path, hosts: str, node_rank: int | None
) -> None:
    name = os.uname().nodename
    (tmp_path / "nodes").write_text(hosts.replace("here", f"{name}.example.org").replace(" ", "\n") + "\n")
    environ = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
    place = place_of(environ | {"PBS_JOBID": "12.x/../y", "PBS_NODEFILE": str(tmp_path / "nodes")})
    assert place is not None
    assert (place.node_rank, place.num_nodes, place.job) == (node_rank, 2, "12.x_.._y")


def test_a_directory_that_another_user_created_is_not_used(
    open_folder: Path, as_nobody: Callable[[], AbstractContextManager[None]]
) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can create a directory of another user")
    open_folder.chmod(0o1777)
    directory = open_folder / ".ddp-hpc-doctor-7"
    directory.mkdir()
    directory.chmod(0o777)
    (directory / "question").write_text(json.dumps({"run": "a" * 16}))
    with as_nobody():
        assert not answer(directory, 1, [], wait_s=0.5)
        assert [entry.name for entry in directory.iterdir()] == ["question"]
        with pytest.raises(FileExistsError):
            ask(directory, "b" * 16)
