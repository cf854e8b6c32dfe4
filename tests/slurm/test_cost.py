"""The cost of runs on a real Slurm whose ranks were killed, compared with what the programs have recorded."""

from __future__ import annotations

import json
import math
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from ddp_hpc.queue.run_cost import RunCost, run_cost

from .cluster import Cluster
from .survival_runs import OPTIONS, PROJECT, Run, submit_program
from .test_restarts import END_S, LONG, check_complete, recorded, submit_plain

pytestmark = [pytest.mark.slurm, pytest.mark.check]

TIMED = PROJECT / "tests" / "slurm" / "timed_training.py"
NUM_NODES = 2
RESTART = "ddp-hpc: restart 1 of 3 in this job"


def job_times(run: Run) -> tuple[float, float]:
    """Returns the start and the end of the job according to Slurm, which omits the parts of seconds."""
    job = run.cluster.job(run.job)
    began_s, ended_s = (
        time.mktime(time.strptime(job[name], "%Y-%m-%dT%H:%M:%S")) for name in ("StartTime", "EndTime")
    )
    return began_s, ended_s


def check(run: Run, expected_s: dict[str, float]) -> RunCost:
    """Compares each category, in seconds of the job, and the sum with Slurm's."""
    cost = run_cost(run.folder / "runs" / "ddp", is_running=False)
    assert cost is not None
    found_s = {name: 3600 * hours / NUM_NODES for name, hours in cost.node_hours.items()}
    print({name: (round(found_s[name], 2), round(expected_s.get(name, 0.0), 2)) for name in found_s})
    began_s, ended_s = job_times(run)
    for name, seconds in found_s.items():
        # Slurm's start of the job can be a second too early.
        limit_s = max(1.0, 0.05 * expected_s.get(name, 0.0)) + (
            1.0 if name in ("start", "after_the_end") else 0
        )
        assert math.isclose(seconds, expected_s.get(name, 0.0), abs_tol=limit_s), name
    assert math.isclose(sum(found_s.values()), ended_s - began_s, abs_tol=2.0)
    walls_s = sum(attempt.wall_s for attempt in cost.attempts)
    assert sum(found_s.values()) == pytest.approx(walls_s), "the sum is the allocation"
    assert [attempt.attempt for attempt in cost.attempts] == [1, 2]
    return cost


def test_the_cost_of_a_training_with_a_lost_rank(cluster: Cluster, tmp_path: Path) -> None:
    program = ["python", TIMED, *OPTIONS, "--max-steps", 40, "--snapshot-every-steps", 10, "--log-every", 5]
    run = submit_program(cluster, tmp_path, program, step_s=0, render=LONG)
    run.wait_for_step(25)
    killed_s = time.time()
    run.kill_rank(1)
    run.wait_for_words(RESTART)
    restarted_s = time.time()
    check_complete(run, 2)
    began_s, ended_s = job_times(run)
    parts = [json.loads(line) for line in (tmp_path / "parts.jsonl").read_text().splitlines()]
    before = [part for part in parts if part["ended_s"] < restarted_s]
    after = [part for part in parts if part["began_s"] > restarted_s]
    saves = of(before, "save")
    resumed_at = run.attempts[1][2]
    kept = saves[resumed_at // 10 - 1]
    kept_parts = [part for part in before if part["ended_s"] <= kept["ended_s"]]
    first_s, again_s = of(before, "step")[0]["began_s"], of(after, "step")[0]["began_s"]
    last_s = of(after, "save")[-1]["ended_s"]
    saves_s, data_s = (total(kept_parts, name) + total(after, name) for name in ("save", "data"))
    cost = check(
        run,
        {
            "useful_steps": kept["ended_s"] - first_s + last_s - again_s - saves_s - data_s,
            "start": first_s - began_s - total(before, "restore"),
            "restore": total(before, "restore") + total(after, "restore"),
            "saves": saves_s,
            "data": data_s,
            "repeated_steps": killed_s - kept["ended_s"],
            "detection": restarted_s - killed_s,
            "restarts": again_s - restarted_s - total(after, "restore"),
            "after_the_end": ended_s - last_s,
        },
    )
    [reason] = cost.restarts
    assert f"on {cluster.node_names[1]}" in reason
    status = run.cluster.run(["env", "-C", str(tmp_path), "ddp-hpc", "status", run.job])
    print(status.stdout)


def of(parts: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [part for part in parts if part["part"] == name]


def total(parts: list[dict[str, Any]], name: str) -> float:
    return sum(part["ended_s"] - part["began_s"] for part in of(parts, name))


@pytest.mark.parametrize("launcher", ["srun", pytest.param("mpiexec", marks=pytest.mark.soak)])
def test_the_cost_of_a_plain_program_that_was_killed(cluster: Cluster, tmp_path: Path, launcher: str) -> None:
    run = submit_plain(cluster, tmp_path, "kill", 18, step_s=0.5, launcher=launcher)
    run.wait_for_words(RESTART, END_S)
    restarted_s = time.time()
    check_complete(run, 2)
    began_s, ended_s = job_times(run)
    steps = recorded(tmp_path)[:-1]
    killed_s = float((tmp_path / "failed").read_text())
    [last] = [step for step, later in pairwise(steps) if step["began_s"] != later["began_s"]]
    saved_s = next(step["at_s"] for step in steps if step["step"] == 15)
    assert last["step"] == 17
    check(
        run,
        {
            "useful_steps": saved_s - steps[0]["began_s"] + steps[-1]["at_s"] - steps[-1]["began_s"],
            "start": steps[0]["began_s"] - began_s,
            "repeated_steps": killed_s - saved_s,
            "detection": restarted_s - killed_s,
            "restarts": steps[-1]["began_s"] - restarted_s,
            "after_the_end": ended_s - steps[-1]["at_s"],
        },
    )
