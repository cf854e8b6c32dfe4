"""A job on a real Slurm checks its nodes before the start; a bad one is replaced, and left out later."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddp_hpc.base.hostlist import expand_hostlist

from .cluster import Cluster
from .configuration import Settings
from .nodes import wait_for
from .survival_runs import PROJECT, PYTHON, Run, submit, submit_program

pytestmark = [pytest.mark.slurm, pytest.mark.check]

FAULTS = PROJECT / "tests" / "node_check" / "faults"
KILLED = "the process that checks the device was killed by SIGKILL (matrix product)"
# The first attempt records a checkpoint and requests another one.
STOPS_ONCE = """
import os
import pathlib
import sys

if os.environ["RANK"] == "0" and os.environ["DDP_HPC_THIS_ATTEMPT"].startswith("1 "):
    pathlib.Path(os.environ["DDP_HPC_PROGRESS_FILE"]).touch()
    sys.exit(75)
"""


@pytest.fixture
def cluster4() -> Iterator[Cluster]:
    """A cluster of four nodes."""
    with Cluster(Settings(num_nodes=4)) as cluster:
        yield cluster


def with_fault(cluster: Cluster, fault: str = "killed", *options: str) -> tuple[str, ...]:
    """Options of render, with which the check fails on the second node."""
    values = {
        "FAULT": fault,
        "FAULTY_HOST": cluster.node_names[1],
        "PYTHONPATH": f"{FAULTS}:{PROJECT}",
    }
    return (*(word for name, value in values.items() for word in ("--env", f"{name}={value}")), *options)


def ddp_hpc(run: Run, *words: object) -> str:
    argv = [PYTHON, "-m", "ddp_hpc", *map(str, words)]
    done = run.cluster.run(list(map(str, argv)), env={"PYTHONPATH": str(PROJECT)}, cwd=run.folder)
    print(done.stderr)
    return done.stdout.strip()


def nodes_of(run: Run, job: str) -> list[str]:
    return expand_hostlist(run.cluster.job(job)["NodeList"])


def test_a_node_that_fails_its_check_is_replaced_and_left_out_by_the_next_job(
    cluster4: Cluster, tmp_path: Path
) -> None:
    first, second, third, fourth = cluster4.node_names
    render = with_fault(cluster4, "killed", "--spare-nodes", "1")
    run = submit(cluster4, tmp_path, num_steps=20, step_s=0.0, render=render)
    end = run.end(150)
    assert (end.state, end.exit_code) == ("COMPLETED", 0), run.log
    assert f"ddp-hpc: node {second}: {KILLED}; replaced by {third}\n" in run.log
    assert "ddp-hpc: 2 nodes checked in " in run.log, "the new node is checked, too"
    assert f"--nodelist={first},{third}" in run.log.partition("nodes checked in")[2]
    [failed] = json.loads(ddp_hpc(run, "status", run.job, "--json"))["failed_nodes"]
    assert (failed["node"], failed["reason"]) == (second, KILLED)
    assert f"left out  node {second}, since " in ddp_hpc(run, "status", run.job)

    job = ddp_hpc(run, "submit", "job.sbatch")
    cluster4.wait(job, 60)
    assert nodes_of(run, job) == [first, third, fourth]
    job = ddp_hpc(run, "submit", "job.sbatch", "--forget-nodes")
    cluster4.wait(job, 60)
    assert nodes_of(run, job) == [first, second, third]


def test_a_requeued_job_does_not_get_the_node_again(cluster4: Cluster, tmp_path: Path) -> None:
    first, second, third, fourth = cluster4.node_names
    (tmp_path / "stops_once.py").write_text(STOPS_ONCE)
    render = with_fault(cluster4, "killed", "--spare-nodes", "1")
    run = submit_program(cluster4, tmp_path, ["python", "stops_once.py"], step_s=0.0, render=render)
    end = run.end(150)
    assert (end.state, end.exit_code) == ("COMPLETED", 0), run.log
    assert [number for number, _, _ in run.attempts] == [1, 2]
    assert cluster4.job(run.job)["ExcNodeList"] == second
    assert nodes_of(run, run.job) == [first, third, fourth]


def test_without_spare_nodes_the_requeued_job_runs_on_other_nodes(cluster4: Cluster, tmp_path: Path) -> None:
    render = with_fault(cluster4, "hang", "--node-check", "replace", "--launcher", "torchrun")
    run = submit(cluster4, tmp_path, num_steps=20, step_s=0.0, render=render)
    end = run.end(150)
    assert (end.state, end.exit_code) == ("COMPLETED", 0), run.log
    second = cluster4.node_names[1]
    assert f"warning: node {second}: no answer from the CPU within " in run.log
    assert "; this job is requeued, and attempt 1 begins\n" in run.log
    assert [number for number, _, _ in run.attempts] == [1], "a start without ranks is not an attempt"
    assert cluster4.job(run.job)["ExcNodeList"] == second
    assert second not in nodes_of(run, run.job)


def test_a_node_that_the_sites_health_check_has_drained_is_replaced(
    cluster4: Cluster, tmp_path: Path
) -> None:
    """LBNL NHC sets the reason of the node, as its helper node-mark-offline does."""
    _, second, third, _ = cluster4.node_names
    script_waits = ("--setup", "while [[ ! -e go ]]; do sleep 0.1; done", "--spare-nodes", "1")
    run = submit(cluster4, tmp_path, num_steps=20, step_s=0.0, render=script_waits)
    wait_for("start", lambda: cluster4.job(run.job)["JobState"] == "RUNNING", 60)
    reason = "NHC: check_fs_mount:  /scratch not mounted"
    drain = ["scontrol", "update", f"NodeName={second}", "State=DRAIN", f"Reason={reason}"]
    cluster4.run(drain).check_returncode()
    (tmp_path / "go").touch()
    end = run.end(150)
    assert (end.state, end.exit_code) == ("COMPLETED", 0), run.log
    assert f"node {second}: {reason}; replaced by {third}\n" in run.log
