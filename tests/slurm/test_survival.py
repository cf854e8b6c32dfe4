"""Runs on a real Slurm survive time limits, requeues, and the loss of ranks, daemons, nodes and cables."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.training.forked import Forks

from .cluster import Cluster
from .configuration import Settings
from .nodes import wait_for
from .survival_runs import PROJECT, PYTHON, Run, losses_of_a_quiet_run, resubmit, submit

pytestmark = pytest.mark.slurm

# These options save a snapshot every 5 steps, from which the next attempt resumes.
SAVING = ["--log-every", "5", "--snapshot-every-steps", "5"]
# Within this number of seconds after a loss, the job must end, or an error must name the node.
PROMISED_S = 120.0


@pytest.fixture(scope="module")
def quiet(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, float]]:
    """The step and loss of each step of a run without failures."""
    return losses_of_a_quiet_run(forks, tmp_path_factory.mktemp("quiet"), 40)


def check_done(run: Run, quiet: list[tuple[int, float]], num_steps: int) -> None:
    """Checks that every step was trained exactly once, with the losses of the run without failures."""
    end = run.end(1.5 * PROMISED_S)  # the training included
    assert (end.state, end.exit_code) == ("COMPLETED", 0), run.log
    assert run.state.startswith(f"done {num_steps}"), run.log
    assert run.losses == quiet[:num_steps]


@pytest.mark.parametrize("links", [2, pytest.param(3, marks=pytest.mark.soak)])
def test_a_job_with_a_short_time_limit_is_requeued_until_the_run_is_done(
    cluster: Cluster, quiet: list[tuple[int, float]], tmp_path: Path, links: int
) -> None:
    # As Slurm 23 and later exports it. The kill delay takes 30 s of these, which leaves one step per job.
    limit = "export DDP_HPC_KILL_DELAY_S=30 SLURM_JOB_END_TIME=$(($(date +%s) + 31)); "
    limit += "echo restart ${SLURM_RESTART_COUNT:-0}"
    run = submit(cluster, tmp_path, num_steps=links, step_s=0.5, render=("--setup", limit))
    check_done(run, quiet, links)
    assert run.attempts == [(step + 1, run.job, step) for step in range(links)]
    # All attempts append to the same log.
    told = re.findall(r"^restart \d+$", run.log, re.MULTILINE)
    assert told == [f"restart {number}" for number in range(links)]
    stopped = "Stopping: the job's time limit is near (DDP_HPC_DEADLINE;"
    assert run.log.count(stopped) == links - 1
    assert run.log.count(f"; this job is requeued, and attempt {links} resumes the run\n") == 1


def test_a_killed_rank_is_named_and_the_same_job_starts_its_ranks_again(
    cluster: Cluster, quiet: list[tuple[int, float]], tmp_path: Path
) -> None:
    run = submit(cluster, tmp_path, *SAVING, num_steps=20, step_s=0.1)
    run.wait_for_step(10)
    run.kill_rank(1)
    check_done(run, quiet, 20)
    lost = f"rank 1 on {cluster.node_names[1]} "
    assert f"[rank 0/2 {cluster.node_names[0]}] error: {lost}is gone" in run.log
    again, job, step = run.attempts[1]
    assert (again, job) == (2, run.job)
    restart = f"ddp-hpc: restart 1 of 3 in this job, from step {step}"
    assert f"{restart}, because attempt 1 failed: {lost}" in run.log


@pytest.mark.soak
def test_a_job_whose_predecessor_is_lost_but_still_shown_as_running_waits_and_resumes(
    forks: Forks, tmp_path: Path
) -> None:
    with Cluster(Settings(slurmd_timeout_s=30)) as cluster:
        quiet = losses_of_a_quiet_run(forks, tmp_path, 20)
        render = ("--nodes", "1", "--ranks-per-node", "2")
        run = submit(cluster, tmp_path, *SAVING, num_steps=20, step_s=0.2, render=render)
        cluster.run(["scontrol", "update", f"job={run.job}", "Requeue=0"]).check_returncode()
        run.wait_for_step(10)
        power_off(cluster, cluster.node_names[0])
        second = resubmit(run, 0.2, f"--exclude={cluster.node_names[0]}")
        check_done(second, quiet, 20)
        assert (
            f"shows job {run.job}, which uses the run directory, as running; waiting at most 360 s"
            in second.log
        )
        assert [job for _, job, _ in second.attempts] == [run.job, second.job]


@pytest.mark.check
def test_a_second_job_of_a_running_run_is_refused_and_changes_nothing(
    cluster: Cluster, tmp_path: Path
) -> None:
    run = submit(cluster, tmp_path, *SAVING, num_steps=60, step_s=0.3, render=("--nodes", "1"))
    run.wait_for_step(5)
    command, env = [PYTHON, "-m", "ddp_hpc"], {"PYTHONPATH": str(PROJECT)}
    done = cluster.run([*command, "submit", "job.sbatch"], env=env, cwd=tmp_path)
    assert f"warning: job {run.job} of the run in " in done.stderr
    assert "runs/ddp is running; a job that starts while another one of its run is running" in done.stderr
    second = replace(run, job=done.stdout.strip())
    assert second.end(60).exit_code == 2
    assert f"runs/ddp is in use by job {run.job}, which is running; submit this job again when " in second.log
    done = cluster.run([*command, "status", "runs/ddp"], env=env, cwd=tmp_path)
    assert f"job       {run.job} (ddp of " in done.stdout
    # The second job has ended, and the first one is still running.
    done = cluster.run([*command, "submit", "job.sbatch"], env=env, cwd=tmp_path)
    assert f"warning: job {run.job} of the run in " in done.stderr
    end = run.end()
    assert (end.state, end.exit_code) == ("COMPLETED", 0), run.log
    assert run.attempts == [(1, run.job, 0)]
    assert run.state.startswith("done 60")


@pytest.mark.soak
def test_a_requeued_job_resumes_and_a_cancelled_one_saves_and_ends(
    cluster: Cluster, quiet: list[tuple[int, float]], tmp_path: Path
) -> None:
    run = submit(cluster, tmp_path, *SAVING, num_steps=40, step_s=0.2)
    run.wait_for_step(10)
    cluster.run(["scontrol", "requeue", run.job]).check_returncode()
    wait_for("requeued job", lambda: cluster.start_requeued(run.job))
    run.wait_for_step(20)
    cluster.run(["scancel", run.job]).check_returncode()
    assert cluster.wait(run.job).state == "CANCELLED"
    assert [job for _, job, _ in run.attempts] == [run.job, run.job]
    assert "no other job is submitted; to resume: cd " in run.log
    step = run.losses[-1][0]
    assert run.state == f"requeue {step} rank 0 received SIGTERM"
    assert 20 <= step < 40
    assert run.losses == quiet[:step]


def power_off(cluster: Cluster, name: str) -> None:
    cluster.power_off(name)


def kill_slurmd(cluster: Cluster, name: str) -> None:
    cluster.slurmd(name, "kill")


@pytest.mark.soak
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("lose", "num_steps"), [(power_off, 40), (kill_slurmd, 240)])
def test_a_lost_node_is_replaced_by_a_spare_one(
    lose: Callable[[Cluster, str], None], num_steps: int, rank: int, forks: Forks, tmp_path: Path
) -> None:
    """Slurm notices the loss after SlurmdTimeout and requeues.

    Without slurmd, a node's ranks keep running.
    """
    with Cluster(Settings(num_nodes=3, slurmd_timeout_s=10)) as cluster:
        quiet = losses_of_a_quiet_run(forks, tmp_path, num_steps)
        run = submit(cluster, tmp_path, *SAVING, num_steps=num_steps, step_s=0.2)
        run.wait_for_step(10)
        lose(cluster, cluster.node_names[rank])
        lost_s = time.monotonic()
        check_done(run, quiet, num_steps)
        waited_s = time.monotonic() - lost_s - 0.2 * (num_steps - 10)
        assert waited_s < PROMISED_S, f"{waited_s:.0f} s beyond the training itself"
        print(f"{waited_s:.0f} s beyond the training itself")
        assert len(run.attempts) == 2
        assert run.attempts[1][2] >= 10


@pytest.mark.soak
@pytest.mark.parametrize("rank", [0, 1])
def test_an_unreachable_node_is_named_and_the_job_resumes_when_it_is_connected_again(
    rank: int, forks: Forks, tmp_path: Path
) -> None:
    """SlurmdTimeout has Slurm's default, within which Slurm does not notice the loss."""
    with Cluster(Settings(slurmd_timeout_s=300)) as cluster:
        here, there = cluster.node_names
        quiet = losses_of_a_quiet_run(forks, tmp_path, 40)
        run = submit(cluster, tmp_path, *SAVING, num_steps=40, step_s=0.2)
        run.wait_for_step(10)
        cluster.set_link(cluster.node_names[rank], "down")
        named = f"[rank 0/2 {here}] error: rank 1 on {there} is cut off, last seen "
        run.wait_for_words(named, PROMISED_S)
        # Each node reports the other one, and both can write to the run directory: the first report is kept.
        gone = "the node or its network is down"
        words = (f" lost contact with rank 0 on {here}: {gone}", f" rank 1 on {there} is cut off, ")
        assert any(word in run.state for word in words), run.state
        assert gone in run.state
        cluster.set_link(cluster.node_names[rank], "up")
        check_done(run, quiet, 40)
        if rank == 1:
            # Rank 1's node reported its exit while it was cut off: without this, srun would wait for it until
            # the time limit. If the node with srun was cut off, slurmd sometimes reports the exit again.
            assert "ddp-hpc: terminating srun" in run.log
        assert len(run.attempts) == 2
