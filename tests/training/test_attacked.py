"""An attacker without the job's key connects to every port of a running job."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import PROJECT, clean_environ
from tests.job_processes import command_of, job, listening_at, processes_below
from tests.waiting import PATIENCE

from .forked import Forks
from .runs import LINEAR, start

PROGRAM = str(Path(__file__).with_name("attacked.py"))
STEPS = ["--max-steps", "60", "--num-samples", "480", "--batch-size", "4", "--log-every", "10"]
ARGUMENTS = [*STEPS, *LINEAR, "--metrics", "metrics.jsonl"]
RUN_ID = "attacked-job"


def wait_for_steps(job: subprocess.Popen[str], cwd: Path) -> None:
    end_s = time.monotonic() + PATIENCE * 90
    while not (cwd / "metrics.jsonl").exists() or not (cwd / "metrics.jsonl").stat().st_size:
        assert job.poll() is None, job.communicate()
        assert time.monotonic() < end_s
        time.sleep(0.1)


def attack(ports: set[str], cwd: Path, stays_s: float = 1.0) -> dict[str, list[str]]:
    """The results of an attack, by port."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.stranger", *sorted(ports)],
        cwd=PROJECT,
        env=clean_environ(
            {"CANARY": str(cwd / "canary"), "STRANGER_RUN_ID": RUN_ID, "STRANGER_STAYS_S": str(stays_s)}
        ),
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


def losses(cwd: Path) -> list[Any]:
    return [json.loads(line)["loss"] for line in (cwd / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def undisturbed(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    cwd = tmp_path_factory.mktemp("undisturbed")
    (cwd / "over").touch()
    ended = forks.script(PROGRAM, *ARGUMENTS, cwd=cwd)
    assert ended.exit_code == 0, ended.stderr
    return losses(cwd)


SCRIPT = ["bash", str(PROJECT / "jobs" / "torchrun_script.sh"), PROGRAM, *ARGUMENTS]
SCRIPT_ENV = {"DDP_HPC_RANKS_PER_NODE": "2", "PBS_JOBID": RUN_ID}


@pytest.mark.check
@pytest.mark.parametrize(
    ("argv", "env"),
    [
        pytest.param([*start(2), PROGRAM, *ARGUMENTS], {}, id="mpiexec"),
        pytest.param(SCRIPT, SCRIPT_ENV, id="torchrun_script.sh", marks=pytest.mark.soak),
    ],
)
def test_an_attacker_at_every_port_changes_nothing(
    tmp_path: Path, undisturbed: list[Any], argv: list[str], env: dict[str, str]
) -> None:
    with job(argv, tmp_path, **env) as started:
        wait_for_steps(started, tmp_path)
        pids = processes_below(started.pid)
        ports = set().union(*map(listening_at, pids))
        assert len(ports) >= 5, "the store, the heartbeat, and gloo's two"
        achieved = attack(ports, tmp_path)
        (tmp_path / "over").touch()
        _, err = started.communicate(timeout=60)
    assert started.returncode == 0, err
    assert {port: found for port, found in achieved.items() if found} == {}
    assert losses(tmp_path) == undisturbed
    assert not (tmp_path / "canary").exists()
    warnings = [line for line in err.splitlines() if "warning: " in line]
    assert any("without this job's key" in line for line in warnings)
    assert len(warnings) <= 8, err


@pytest.mark.soak
def test_the_same_attacker_executes_code_through_torchs_rendezvous(tmp_path: Path) -> None:
    """Shows that the attack works against torch's own rendezvous."""
    env = {**SCRIPT_ENV, "DDP_HPC_RDZV_BACKEND": "c10d"}
    with job(SCRIPT, tmp_path, **env) as started:
        wait_for_steps(started, tmp_path)
        agents = [pid for pid in processes_below(started.pid) if b"ddp_hpc.torchrun" in command_of(pid)]
        attack(set().union(*map(listening_at, agents)), tmp_path, stays_s=8.0)
        end_s = time.monotonic() + PATIENCE * 30
        while not (tmp_path / "canary").exists() and time.monotonic() < end_s:
            time.sleep(0.2)
    assert (tmp_path / "canary").exists()
