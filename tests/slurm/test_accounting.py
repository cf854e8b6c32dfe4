"""status, logs and cancel after the controller has forgotten the jobs, on a real Slurm with accounting."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from .cluster import Cluster
from .nodes import wait_for
from .test_queue import ddp_hpc, end_soon, status

# The jobs end after about 30 s, and the controller forgets them within 20 s more.
pytestmark = [pytest.mark.slurm(accounting=True), pytest.mark.check]

# In the array `half`, task 3 runs until it is cancelled; in the array `whole`, it ends too.
TASK = """\
case $SLURM_ARRAY_TASK_ID in
1) echo "ValueError: odd"; exit 3 ;;
2) sleep 300 ;;
3) [[ $SLURM_JOB_NAME == whole ]] || sleep 300 ;;
esac
echo fine
"""
SCRIPTS = {
    "done": ("echo fine", []),
    "failed": ("echo ValueError: odd; exit 3", []),
    "timeout": ("sleep 300", ["--time=1"]),
    "cancelled": ("sleep 300", []),
    "never": ("true", ["--hold"]),
    "whole": (TASK, ["--array=0-3"]),
    "half": (TASK, ["--array=0-3"]),
}


@dataclass(frozen=True)
class Jobs:
    """Jobs that have ended and that the controller has forgotten, except task 3 of the array `half`."""

    cluster: Cluster
    folder: Path
    ids: dict[str, str]

    def status(self, name: str, task: str = "") -> dict[str, Any]:
        return status(self.cluster, self.folder, self.ids[name] + task)

    def ddp_hpc(self, command: str, name: str, task: str = "") -> subprocess.CompletedProcess[str]:
        return ddp_hpc(self.cluster, self.folder, command, self.ids[name] + task)

    def known_ids(self) -> list[str]:
        return self.cluster.run(["squeue", "--states=all", "--noheader", "--format=%i"]).stdout.split()


@pytest.fixture(scope="module")
def jobs(accounting_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    cluster, folder = accounting_cluster, tmp_path_factory.mktemp("forgotten")
    ids = {
        name: cluster.sbatch(f"#!/bin/bash\n{text}\n", f"--job-name={name}", *options, cwd=folder)
        for name, (text, options) in SCRIPTS.items()
    }
    end_soon(cluster, ids["timeout"])
    found = Jobs(cluster, folder, ids)
    wait_for("start of the jobs", lambda: f"{ids['half']}_3" in found.known_ids(), 30)
    live = [ids["cancelled"], f"{ids['half']}_2", f"{ids['whole']}_2"]
    for job_id in live:
        wait_for(f"start of {job_id}", lambda job_id=job_id: cluster.job(job_id)["JobState"] == "RUNNING", 30)
    for job_id in (*live, ids["never"]):
        cluster.run(["scancel", job_id]).check_returncode()
    wait_for("a controller without these jobs", lambda: found.known_ids() == [f"{ids['half']}_3"], 180, 0.5)
    yield found
    cluster.cancel_all()


@pytest.mark.parametrize(
    ("name", "verdict", "code", "cause"),
    [
        ("done", "done", 0, ""),
        ("failed", "failed", 1, "failed: exit code 3"),
        ("timeout", "failed", 1, "walltime: it reached its walltime of 00:01:00"),
        ("cancelled", "cancelled", 1, "cancelled: it was cancelled; cancelled by root"),
        ("never", "cancelled", 1, "cancelled: it was cancelled; cancelled by root"),
    ],
)
def test_a_forgotten_job_is_read_from_the_accounting(
    jobs: Jobs, name: str, verdict: str, code: int, cause: str
) -> None:
    found = jobs.status(name)
    assert (found["verdict"], found["exit"], found["job"]["name"]) == (verdict, code, name)
    dead = found["post_mortem"]
    assert (f"{dead['cause']}: {dead['what']}" if dead else "") == cause


def test_the_log_of_a_forgotten_job_is_found(jobs: Jobs) -> None:
    done = jobs.ddp_hpc("logs", "failed")
    assert (done.returncode, done.stdout, done.stderr) == (0, "ValueError: odd\n", "")
    assert jobs.ddp_hpc("logs", "half", "_1").stdout == "ValueError: odd\n"


def test_a_forgotten_array_is_shown_with_its_failed_tasks(jobs: Jobs) -> None:
    done = jobs.ddp_hpc("status", "whole")
    array = jobs.ids["whole"]
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.splitlines() == [
        f"job       {array} (whole of root): failed",
        "tasks     2 done, 1 cancelled, 1 failed",
        f"task      {array}_1: failed; failed: exit code 3",
        "  | ValueError: odd",
        f"task      {array}_2: cancelled; cancelled: it was cancelled; cancelled by root",
        f"details   ddp-hpc status {array}_1",
    ]


def test_a_forgotten_task_is_read_from_the_accounting_while_another_task_runs(jobs: Jobs) -> None:
    answer = jobs.cluster.run(["scontrol", "show", "job", f"{jobs.ids['half']}_1"])
    assert "not found" in answer.stdout + answer.stderr  # stderr in Slurm 26.05
    assert jobs.status("half", "_0")["verdict"] == "done"
    assert jobs.status("half", "_1")["post_mortem"]["what"] == "exit code 3"
    assert jobs.status("half", "_3")["verdict"] == "running"
    assert jobs.status("half")["counts"] == {"done": 1, "cancelled": 1, "running": 1, "failed": 1}


def test_only_the_live_tasks_of_an_array_are_cancelled(jobs: Jobs) -> None:
    ended = jobs.ddp_hpc("cancel", "whole")
    assert (ended.returncode, ended.stdout) == (0, "")
    assert ended.stderr == (
        f"all tasks of job {jobs.ids['whole']} have already ended (2 done, 1 cancelled, 1 failed)\n"
    )
    done = jobs.ddp_hpc("cancel", "half")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{jobs.ids['half']}\n", "")
    wait_for("end of the array", lambda: jobs.status("half")["counts"].get("cancelled") == 2, 30)
