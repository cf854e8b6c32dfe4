"""`ddp-hpc doctor` on several nodes of a job, simulated by processes with Slurm's variables."""

from __future__ import annotations

import json
import socket
import sys

from tests.conftest import Ended, Launch

STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_TASKS_PER_NODE": "1(x3)",
}
HOST = socket.gethostname().partition(".")[0]


def doctor(launch: Launch, *options: str, **env: str) -> Ended:
    checks = ("--only", "open-files", "--only", "tmp-space")
    return launch([sys.executable, "-m", "ddp_hpc", "doctor", *checks, *options], env=STEP | env)


def test_each_node_prints_its_problems_after_its_name(launch: Launch) -> None:
    ended = doctor(launch, TMPDIR="/no/such/directory")
    (line,) = ended.stdout.splitlines()
    assert line.startswith(f"[{HOST}] fail  tmp-space       cannot write to /no/such/directory")
    assert ended.stderr == f"[{HOST}] 1 ok, 0 warn, 1 fail\n"
    assert ended.exit_code == 1


def test_each_node_prints_one_json_object(launch: Launch) -> None:
    report = json.loads(doctor(launch, "--json").stdout)
    assert (report["host"], report["num_nodes"]) == (HOST, 3)
    assert [row["name"] for row in report["results"]] == ["open-files", "tmp-space"]


def test_a_second_rank_on_a_node_does_nothing(launch: Launch) -> None:
    ended = doctor(launch, SLURM_LOCALID="1", SLURM_STEP_NUM_TASKS="6", SLURM_STEP_TASKS_PER_NODE="2(x3)")
    assert (ended.exit_code, ended.stdout, ended.stderr) == (0, "", "")


def test_a_process_with_contradictory_variables_checks_its_node(launch: Launch) -> None:
    assert len(doctor(launch, SLURM_PROCID="9").stdout.splitlines()) == 2
