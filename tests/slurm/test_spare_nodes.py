"""A job with a spare node on a real Slurm loses a node, and goes on without waiting in the queue again."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ddp_hpc.queue.run_cost import run_cost
from tests.training.forked import Forks

from .cluster import Cluster
from .configuration import Settings
from .nodes import wait_for
from .survival_runs import (
    OPTIONS,
    PROJECT,
    Run,
    assert_same_weights,
    losses_of_a_quiet_run,
    read_losses,
    submit,
    submit_program,
)
from .test_restarts import PLAIN, recorded
from .test_survival import SAVING

pytestmark = pytest.mark.slurm

NUM_STEPS = 600
# The time from the loss of a node to the next step, without the check of nodes and the start of the program,
# which take long on a busy machine.
PROMISED_S = 60.0


@pytest.fixture
def cluster3() -> Iterator[Cluster]:
    """A cluster of three nodes."""
    with Cluster(Settings(num_nodes=3)) as cluster:
        yield cluster


def moments(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "timeline").read_text().splitlines()]


def without_start_s(run: Run, waited_s: float) -> float:
    """Returns the part of the wait for the second attempt that its check and its start have not taken."""
    lines = [line for line in moments(run.folder / "runs" / "ddp") if line["attempt"] == f"2 {run.job}"]
    at_s = {line["moment"]: line["at_s"] for line in reversed(lines)}
    started_s = at_s["launcher started"]
    begun_s = at_s.get("steps began") or at_s.get("program began") or started_s
    [checks_s] = [line["checks_s"] for line in lines if line["moment"] == "launcher started"]
    return waited_s - checks_s - (begun_s - started_s)


def lose_node(cluster: Cluster, name: str, how: str) -> None:
    if how == "power":
        cluster.power_off(name)
    else:
        cluster.set_link(name, "down")


def repair_node(cluster: Cluster, name: str, how: str) -> None:
    """Slurm then ends what it has of a job on this node, and the job no longer waits for the node."""
    if how == "power":
        cluster.power_on(name)
    else:
        cluster.set_link(name, "up")


SOAK = pytest.mark.soak
# With 60 s, Slurm notices the loss while the ranks already run on the spare node: the job must go on. With
# its default, 300 s, it does not notice it before the end of the job.
LOSSES = [
    pytest.param("power", "srun", 300, marks=pytest.mark.check),
    pytest.param("power", "srun", 60, marks=SOAK),
    pytest.param("power", "torchrun", 300, marks=SOAK),
    pytest.param("cable", "srun", 300, marks=SOAK),
    pytest.param("cable", "torchrun", 60, marks=SOAK),
    pytest.param("cable", "torchrun", 300, marks=SOAK),
]


@pytest.mark.parametrize(("lose", "launcher", "slurmd_timeout_s"), LOSSES)
def test_a_node_that_dies_is_replaced_in_the_same_job(
    lose: str, launcher: str, slurmd_timeout_s: int, forks: Forks, tmp_path: Path
) -> None:
    with Cluster(Settings(num_nodes=3, slurmd_timeout_s=slurmd_timeout_s)) as cluster:
        quiet = losses_of_a_quiet_run(forks, tmp_path, NUM_STEPS, "--snapshot-dir", "snapshots")
        run = submit(
            cluster,
            tmp_path,
            *SAVING,
            num_steps=NUM_STEPS,
            step_s=0.1,
            render=("--spare-nodes", "1", "--launcher", launcher),
        )
        run.wait_for_step(200)
        _, second, third = cluster.node_names
        lose_node(cluster, second, lose)
        lost_s = time.monotonic()
        run.wait_for_words("resuming after step")
        num_steps = len(run.losses)
        wait_for("next step", lambda: len(run.losses) > num_steps, 30)
        waited_s = time.monotonic() - lost_s
        print(f"{waited_s:.0f} s from the loss to the next step")
        wait_for("end", lambda: run.state.startswith("done"), 150)
        if slurmd_timeout_s == 300:
            repair_node(cluster, second, lose)
        end = run.end(150)
        assert (end.state, end.exit_code) == ("COMPLETED", 0), run.log
        assert run.losses == quiet
        assert_same_weights(run.folder / "runs" / "ddp", tmp_path / "without_slurm", NUM_STEPS)
        assert [(number, job) for number, job, _ in run.attempts] == [(1, run.job), (2, run.job)]
        assert f"no answer from {second}; replaced by {third}" in run.log
        timeline = moments(run.folder / "runs" / "ddp")
        ends = [line["attempt"] for line in timeline if line["moment"] == "attempt ended"]
        assert ends == [f"1 {run.job}", f"2 {run.job}"], "a rank that was cut off has changed the run"
        assert without_start_s(run, waited_s) < PROMISED_S, run.log
        check_cost(run.folder / "runs" / "ddp", waited_s)


def check_cost(run_dir: Path, waited_s: float) -> None:
    """Checks the node-seconds of a run on two of three nodes."""
    cost = run_cost(run_dir, is_running=False)
    assert cost is not None
    node_s = {name: 3600 * hours for name, hours in cost.node_hours.items()}
    print(node_s)
    walls_s = sum(attempt.wall_s for attempt in cost.attempts)
    assert sum(node_s.values()) == pytest.approx(3 * walls_s)
    assert node_s["idle_nodes"] == pytest.approx(walls_s)
    # The last answer of a node is up to 3 s before its loss.
    checks_s = 3600 * cost.attempts[1].node_hours["node_checks"]
    lost_s = node_s["detection"] + node_s["restarts"] + checks_s + node_s["restore"]
    assert lost_s / 2 == pytest.approx(waited_s, abs=5)
    assert node_s["detection"] / 2 > 5


@pytest.mark.parametrize(
    ("launcher", "global_batch"),
    [
        pytest.param("srun", "", marks=pytest.mark.check),
        pytest.param("torchrun", "8", marks=pytest.mark.soak),
    ],
)
def test_without_a_spare_node_the_run_continues_on_fewer_nodes(
    launcher: str, global_batch: str, forks: Forks, tmp_path: Path
) -> None:
    """The numbers are those of a run that was stopped at the same snapshot, and resumed by hand."""
    more = ["--global-batch", global_batch] if global_batch else []
    with Cluster(Settings(slurmd_timeout_s=60)) as cluster:
        run = submit(
            cluster,
            tmp_path,
            *SAVING,
            *more,
            num_steps=NUM_STEPS // 2,
            step_s=0.1,
            render=("--min-nodes", "1", "--launcher", launcher),
        )
        run.wait_for_step(100)
        lost = cluster.node_names[1]
        cluster.power_off(lost)
        lost_s = time.monotonic()
        run.wait_for_words("resuming after step")
        waited_s = time.monotonic() - lost_s
        print(f"{waited_s:.0f} s from the loss to the next start")
        end = run.end(150)
        assert (end.state, end.exit_code) == ("COMPLETED", 0), run.log
        assert [(number, job) for number, job, _ in run.attempts] == [(1, run.job), (2, run.job)]
        assert f"no answer from {lost}; the ranks use 1 node instead of 2 (--min-nodes)" in run.log
        assert "note: the number of ranks changed from 2 to 1" in run.log
        batch = "the global batch changed from 8 to 4 samples (--batch-size is per rank;"
        assert (batch in run.log) == (not global_batch), run.log
        assert without_start_s(run, waited_s) < PROMISED_S, run.log
    (home := tmp_path / "by_hand").mkdir()
    by_hand = [*OPTIONS, *more, "--snapshot-dir", "snapshots", "--max-steps"]
    forks.run(*by_hand, str(run.attempts[1][2]), cwd=home, ranks=2)
    forks.run(*by_hand, str(NUM_STEPS // 2), cwd=home, ranks=1)
    assert run.losses == read_losses(home / "metrics.jsonl")


@pytest.mark.soak
@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_a_plain_program_continues_on_fewer_nodes(launcher: str, tmp_path: Path) -> None:
    with Cluster(Settings(num_nodes=3, slurmd_timeout_s=60)) as cluster:
        render = ("--nodes", "3", "--min-nodes", "2", "--launcher", launcher)
        run = submit_program(cluster, tmp_path, ["python", PLAIN, 300, 20], step_s=0.1, render=render)
        wait_for("100 steps", lambda: len(recorded(tmp_path)) >= 100, 90)
        cluster.power_off(cluster.node_names[1])
        end = run.end(200)
        assert (end.state, end.exit_code) == ("COMPLETED", 0), run.log
        assert "the ranks use 2 nodes instead of 3 (--min-nodes)" in run.log
        assert "checksum" in recorded(tmp_path)[-1]
        assert [(number, job) for number, job, _ in run.attempts] == [(1, run.job), (2, run.job)]


@pytest.mark.soak
def test_below_the_minimum_number_of_nodes_another_job_resumes_the_run(forks: Forks, tmp_path: Path) -> None:
    with Cluster(Settings(num_nodes=3, slurmd_timeout_s=20)) as cluster:
        quiet = losses_of_a_quiet_run(forks, tmp_path, 200)
        run = submit(cluster, tmp_path, *SAVING, num_steps=200, step_s=0.1, render=("--min-nodes", "2"))
        run.wait_for_step(50)
        lost = cluster.node_names[1]
        cluster.power_off(lost)
        run.wait_for_words(f"no answer from {lost}; too few nodes are left")
        end = run.end(200)
        assert (end.state, end.exit_code) == ("COMPLETED", 0), run.log
        assert run.losses == quiet
        assert [number for number, _, _ in run.attempts] == [1, 2]


@pytest.mark.soak
@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
@pytest.mark.parametrize(("lose", "slurmd_timeout_s"), [("power", 60), ("power", 300), ("cable", 300)])
def test_a_node_of_a_plain_program_that_dies_is_replaced(
    launcher: str, lose: str, slurmd_timeout_s: int, forks: Forks, tmp_path: Path
) -> None:
    """No rank of this program notices that a node has died."""
    (home := tmp_path / "quiet").mkdir()
    assert forks.script(PLAIN, "600", "20", cwd=home).exit_code == 0
    with Cluster(Settings(num_nodes=3, slurmd_timeout_s=slurmd_timeout_s)) as cluster:
        render = ("--spare-nodes", "1", "--launcher", launcher)
        run = submit_program(cluster, tmp_path, ["python", PLAIN, 600, 20], step_s=0.1, render=render)
        wait_for("150 steps", lambda: len(recorded(tmp_path)) >= 150, 90)
        lose_node(cluster, cluster.node_names[1], lose)
        lost_s = time.time()
        wait_for("end", lambda: run.state.startswith("done"), 200)
        if slurmd_timeout_s == 300:
            repair_node(cluster, cluster.node_names[1], lose)
        end = run.end(150)
        assert (end.state, end.exit_code) == ("COMPLETED", 0), run.log
        assert recorded(tmp_path)[-1] == recorded(home)[-1], "the checksums of the weights"
        steps = [record for record in recorded(tmp_path) if "step" in record]
        waited_s = min(record["at_s"] for record in steps if record["began_s"] > lost_s) - lost_s
        print(f"{waited_s:.0f} s from the loss to the next step")
        assert without_start_s(run, waited_s) < PROMISED_S, run.log


def fail_on(cluster3: Cluster, tmp_path: Path, node: int, num_nodes: int) -> None:
    """Runs a program to its end whose ranks fail on this node after 30 steps."""
    program = ["python", PROJECT / "tests" / "slurm" / "bad_node.py", PLAIN, 100, 10]
    render = ("--nodes", str(num_nodes), "--spare-nodes", "1")
    run = submit_program(cluster3, tmp_path, program, step_s=0.05, render=render)
    wait_for("30 steps", lambda: len(recorded(tmp_path)) >= 30, 60)
    bad, spare = cluster3.node_names[node], cluster3.node_names[num_nodes]
    (tmp_path / "broken").write_text(bad)
    end = run.end(120)
    assert (end.state, end.exit_code) == ("COMPLETED", 0), run.log
    assert f"node {bad}: two attempts have failed on it; replaced by {spare}" in run.log
    assert [number for number, _, _ in run.attempts] == [1, 2, 3]


@pytest.mark.check
def test_a_node_on_which_ranks_fail_again_is_replaced(
    cluster3: Cluster, forks: Forks, tmp_path: Path
) -> None:
    """A node that has lost a GPU still answers: it is replaced after its second failure."""
    (home := tmp_path / "quiet").mkdir()
    assert forks.script(PLAIN, "100", "10", cwd=home).exit_code == 0
    fail_on(cluster3, tmp_path, node=1, num_nodes=2)
    assert recorded(tmp_path)[-1] == recorded(home)[-1], "the checksums of the weights"


@pytest.mark.soak
def test_the_ranks_of_one_node_move_to_the_spare_one(cluster3: Cluster, tmp_path: Path) -> None:
    """The supervisor remains on the first node, which still answers."""
    fail_on(cluster3, tmp_path, node=0, num_nodes=1)
    assert "checksum" in recorded(tmp_path)[-1]


@pytest.mark.check
def test_if_the_first_node_is_no_longer_watched_a_line_says_so(cluster3: Cluster, tmp_path: Path) -> None:
    render = ("--spare-nodes", "1")
    run = submit_program(cluster3, tmp_path, ["python", PLAIN, 100, 10], step_s=0.1, render=render)
    wait_for("10 steps", lambda: len(recorded(tmp_path)) >= 10, 60)
    assert run.kill("ddp_hpc.supervisor.guard", node_rank=2)
    run.wait_for_words("the srun that monitors this node from another one has exited with code 137")
    end = run.end(120)
    assert (end.state, end.exit_code) == ("COMPLETED", 0), run.log
    assert [number for number, _, _ in run.attempts] == [1]


@pytest.mark.check
def test_a_total_of_gpus_is_refused_in_one_line(cluster3: Cluster, tmp_path: Path) -> None:
    run = submit_program(
        cluster3, tmp_path, ["true"], step_s=0, render=("--spare-nodes", "1"), sbatch=("--gpus=6",)
    )
    assert run.end().exit_code == 2
    [line] = [line for line in run.log.splitlines() if "error: " in line]
    assert "was given, but --gpus is the number of GPUs of the whole job" in line


@pytest.mark.soak
def test_if_the_first_node_dies_another_one_requeues_the_job(forks: Forks, tmp_path: Path) -> None:
    """With --no-kill, Slurm 22.05 lets the other nodes idle until the end of the walltime."""
    with Cluster(Settings(num_nodes=4, slurmd_timeout_s=20)) as cluster:
        quiet = losses_of_a_quiet_run(forks, tmp_path, 200)
        # With variables of the job that do not suit a step of one task.
        render = ("--spare-nodes", "1", "--directive=--gpus-per-node=2")
        run = submit(cluster, tmp_path, *SAVING, num_steps=200, step_s=0.1, render=render)
        run.wait_for_step(50)
        cluster.power_off(cluster.node_names[0])
        end = run.end(200)
        assert (end.state, end.exit_code) == ("COMPLETED", 0), run.log
        assert run.losses == quiet
        assert [(number, job) for number, job, _ in run.attempts] == [(1, run.job), (2, run.job)]


@pytest.mark.soak
@pytest.mark.parametrize("first_lost", [1, 2], ids=["the second node", "the spare node"])
def test_if_no_spare_node_is_left_another_job_resumes_the_run(
    first_lost: int, forks: Forks, tmp_path: Path
) -> None:
    with Cluster(Settings(num_nodes=3, slurmd_timeout_s=300)) as cluster:
        quiet = losses_of_a_quiet_run(forks, tmp_path, 200)
        run = submit(cluster, tmp_path, *SAVING, num_steps=200, step_s=0.1, render=("--spare-nodes", "1"))
        run.wait_for_step(50)
        cluster.power_off(cluster.node_names[first_lost])
        if first_lost == 1:
            run.wait_for_words("resuming after step")
            run.wait_for_step(100)
        cluster.power_off(cluster.node_names[3 - first_lost])
        lost_s = time.monotonic()
        run.wait_for_words("this job is requeued, and attempt", 300)
        waited_s = time.monotonic() - lost_s
        print(f"{waited_s:.0f} s from the second loss to the requeue")
        for name in cluster.node_names[1:]:
            cluster.power_on(name)
        end = run.end(200)
        assert (end.state, end.exit_code) == ("COMPLETED", 0), run.log
        assert run.losses == quiet
        # If no other node answers, the network of the first node can be the cause, and the ranks decide.
        assert waited_s < 2 * PROMISED_S, run.log
