"""40 random kills of ranks, launchers, supervisors and nodes in runs with restarts and a spare node.

A user submits a job again that has ended without completing the run, and an operator repairs lost nodes. The
run then has the results of an uninterrupted one, and nothing of it is left on a node.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.training.forked import Forks

from .cluster import Cluster
from .configuration import Settings
from .nodes import wait_for
from .survival_runs import Run, assert_same_weights, losses_of_a_quiet_run, resubmit, submit, submit_program
from .test_restarts import (
    AGENT,
    PLAIN,
    PROGRAM,
    SUPERVISOR,
    has_ended,
    jobs_of,
    recorded,
)
from .test_survival import SAVING

pytestmark = [pytest.mark.slurm, pytest.mark.soak, pytest.mark.timeout(1800)]

NUM_STEPS, STEP_S, SAVE_EVERY = 300, 0.2, 5
NUM_KILLS = 10
RENDER = ("--restarts", "3", "--spare-nodes", "1", "--walltime", "00:50:00", "--max-attempts", "100")
# Words of the command line of what is killed. How likely each is.
PROCESSES = {
    "rank": (PROGRAM, 5),
    "parent of a rank": ("^[^ ]*python[^ ]* [^ ]*ddp-hpc exec", 1),
    "agent of torchrun": (AGENT, 2),
    "launcher": ("^srun --nodelist=[^ ]* --overlap --nodes", 3),
    "guard": ("-m ddp_hpc.supervisor.guard", 1),
    "supervisor": (SUPERVISOR, 2),
}
NODES = {"power": 3, "cable": 3}
# Within this time after a kill, the ranks go on, or the job has ended.
MOST_S = 240.0
REPAIR_S = 60.0


class Operation:
    """A run, its jobs, and the nodes that are lost."""

    def __init__(self, run: Run, records: str) -> None:
        self.run, self.jobs = run, [run.job]
        self._records = run.folder / records
        self._cluster = run.cluster
        self._lost: dict[str, tuple[str, float]] = {}

    @property
    def is_complete(self) -> bool:
        return self.run.state.startswith("done")

    def num_records(self) -> int:
        return len(self._records.read_text().splitlines()) if self._records.exists() else 0

    def tend(self) -> None:
        """Repairs nodes after a while, and submits the run again if its job has ended."""
        job = self._cluster.job(self.run.job)
        waits = job["JobState"] == "PENDING" and job.get("Reason") != "BeginTime"
        for name, (_, at_s) in list(self._lost.items()):
            if waits or time.monotonic() > at_s + REPAIR_S:
                self.repair(name)
        self._cluster.start_requeued(self.run.job)
        if has_ended(self.run) and not self.is_complete:
            job = self._cluster.job(self.run.job)
            print(f"job {self.run.job} has ended: {job['JobState']}, {job['ExitCode']}; {self.run.state}")
            self.run = resubmit(self.run, STEP_S)
            self.jobs.append(self.run.job)

    def wait_until(self, what: str, look: Callable[[], bool]) -> None:
        """Waits until `look` is true, or the run is complete."""

        def is_over() -> bool:
            self.tend()
            return look() or self.is_complete

        wait_for(f"{what} (state: {self.run.state}; log:\n{self.run.log})", is_over, MOST_S, 0.3)

    def wait_for_steps(self, num_steps: int) -> None:
        goal = self.num_records() + num_steps
        self.wait_until(f"{num_steps} more steps", lambda: self.num_records() >= goal)

    def wait_for_seconds(self, duration_s: float) -> None:
        end_s = time.monotonic() + duration_s
        self.wait_until("end of the pause", lambda: time.monotonic() > end_s)

    def kill(self, kind: str, chance: random.Random) -> bool:
        """Kills a random process or node of this kind; returns whether there was one."""
        if kind in NODES:
            names = [name for name in self.nodes() if self._lost.get(name) is None]
            if not names:
                return False
            self.repair(*self._lost)
            self._lose(chance.choice(names), kind)
            return True
        up = [name for name in self._cluster.node_names if self._lost.get(name, ("",))[0] != "power"]
        look = ["pgrep", "--full", "--", PROCESSES[kind][0]]
        found = [(name, pid) for name in up for pid in self._cluster.run(look, node=name).stdout.split()]
        if not found:
            return False
        name, pid = chance.choice(found)
        return self._cluster.run(["kill", "-KILL", pid], node=name).returncode == 0

    def nodes(self) -> list[str]:
        """Returns the nodes of the job, if it runs."""
        ask = ["squeue", "--noheader", "--states=running", "--format=%N", f"--jobs={self.run.job}"]
        done = self._cluster.run(ask)
        if not done.stdout.strip():
            return []
        return self._cluster.run(["scontrol", "show", "hostnames", done.stdout.strip()]).stdout.split()

    def _lose(self, name: str, kind: str) -> None:
        self._lost[name] = (kind, time.monotonic())
        if kind == "power":
            self._cluster.power_off(name)
        else:
            self._cluster.set_link(name, "down")

    def repair(self, *names: str) -> None:
        for name in list(names):
            kind, _ = self._lost.pop(name)
            if kind == "power":
                self._cluster.power_on(name)
            else:
                self._cluster.set_link(name, "up")

    def check(self) -> None:
        """Checks that the run is complete, and that nothing of it is left."""
        job = self._cluster.wait(self.run.job, MOST_S, requeues_at_once=True)
        assert (job.state, job.exit_code) == ("COMPLETED", 0), self.run.log
        self.repair(*self._lost)
        logs = [replace(self.run, job=job_id).log for job_id in self.jobs]
        repeated = "the run has failed twice"
        assert not any(repeated in log for log in logs), "a kill was taken for an error of the program"
        starts = self.run.attempts
        first_steps = [step for _, _, step in starts]
        assert first_steps == sorted(first_steps), f"a checkpoint was lost: {starts}"
        for job_id in self.jobs:
            numbers = [number for number, of_job, _ in starts if of_job == job_id]
            assert numbers == sorted({*numbers}), starts
            replace(self.run, job=job_id).check_nothing_left()
        assert jobs_of(self.run) == sorted(self.jobs), "a job was submitted twice"
        assert not self._cluster.run(["squeue", "--steps", "--noheader"]).stdout.strip()
        self._cluster.wait_idle(90)


def kill_at_random(operation: Operation, seed: int) -> None:
    """Kills something `NUM_KILLS` times. Most kills come after some steps, others while the ranks start."""
    chance = random.Random(seed)
    weights = {name: weight for name, (_, weight) in PROCESSES.items()} | NODES
    done: list[str] = []
    print(f"seed {seed}")
    while len(done) < NUM_KILLS and not operation.is_complete:
        if chance.random() < 0.7:
            operation.wait_for_steps(chance.randrange(6, 16))
        else:
            operation.wait_for_seconds(chance.uniform(1.0, 8.0))
        kind = chance.choices(list(weights), list(weights.values()))[0]
        if operation.kill(kind, chance):
            print(f"{time.strftime('%X')} {operation.run.state!r}: {kind}", flush=True)
            done.append(kind)
    operation.wait_until("end", lambda: False)
    print(done, operation.run.attempts, operation.jobs)
    operation.check()
    assert len(done) == NUM_KILLS


@pytest.fixture
def cluster4() -> Cluster:
    """Four nodes, so that another job can run while one node is lost. Slurm notices a loss after 60 s."""
    return Cluster(Settings(num_nodes=4, slurmd_timeout_s=60))


@pytest.mark.parametrize(("launcher", "seed"), [("srun", 10), ("torchrun", 11)])
def test_a_training_loses_and_repeats_nothing(
    cluster4: Cluster, forks: Forks, tmp_path: Path, launcher: str, seed: int
) -> None:
    quiet = losses_of_a_quiet_run(forks, tmp_path, NUM_STEPS, "--snapshot-dir", "snapshots")
    with cluster4 as cluster:
        render = (*RENDER, "--launcher", launcher)
        run = submit(cluster, tmp_path, *SAVING, num_steps=NUM_STEPS, step_s=STEP_S, render=render)
        kill_at_random(Operation(run, "metrics.jsonl"), seed)
        assert run.losses == quiet
        assert_same_weights(tmp_path / "runs" / "ddp", tmp_path / "without_slurm", NUM_STEPS)


@pytest.mark.parametrize(("launcher", "seed"), [("srun", 12), ("torchrun", 13)])
def test_a_plain_program_loses_nothing_and_never_runs_twice_at_once(
    cluster4: Cluster, forks: Forks, tmp_path: Path, launcher: str, seed: int
) -> None:
    (home := tmp_path / "quiet").mkdir()
    assert forks.script(PLAIN, str(NUM_STEPS), str(SAVE_EVERY), cwd=home).exit_code == 0
    with cluster4 as cluster:
        render = (*RENDER, "--launcher", launcher)
        program = ["python", PLAIN, NUM_STEPS, SAVE_EVERY]
        run = submit_program(cluster, tmp_path, program, step_s=STEP_S, render=render)
        kill_at_random(Operation(run, "records.jsonl"), seed)
        records = recorded(tmp_path)
        assert records[-1] == recorded(home)[-1], "the checksums of the weights"
        began = [record["began_s"] for record in records if "began_s" in record]
        assert began == sorted(began), "the ranks of two attempts trained at the same time"
        steps = [record["step"] for record in records if "step" in record]
        assert {*steps} == {*range(1, NUM_STEPS + 1)}
