"""A job on a real Slurm starts its ranks again after a failure (--restarts), and loses nothing."""

from __future__ import annotations

import json
import random
import re
import shlex
import time
from pathlib import Path
from typing import Any

import pytest

from tests.training.forked import Forks

from .cluster import Cluster
from .nodes import wait_for
from .survival_runs import PROJECT, Run, losses_of_a_quiet_run, resubmit, submit, submit_program
from .test_survival import SAVING

pytestmark = [pytest.mark.slurm, pytest.mark.check]

PLAIN = PROJECT / "tests" / "slurm" / "plain_training.py"
NUM_STEPS, SAVE_EVERY = 20, 5
# A restart is refused shortly before the end of the walltime, which a busy machine could reach.
LONG = ("--walltime", "00:20:00")
TORCHRUN = (*LONG, "--launcher", "torchrun")
END_S = 180.0
# From the failure of a rank to the next start of the program; about 1 s on a machine that does nothing else.
MOST_S = 15.0
AGENT = "-m ddp_hpc.torchrun --nnodes"
SUPERVISOR = "python -m ddp_hpc.job"


@pytest.fixture(scope="module")
def checksum(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The checksum of the weights after an uninterrupted run of the plain program."""
    home = tmp_path_factory.mktemp("plain")
    done = forks.script(PLAIN, str(NUM_STEPS), str(SAVE_EVERY), cwd=home)
    assert done.exit_code == 0, done.stderr
    return recorded(home)[-1]["checksum"]


@pytest.fixture(scope="module")
def quiet(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, float]]:
    """The step and loss of each step of an uninterrupted run of ddp_hpc.train."""
    return losses_of_a_quiet_run(forks, tmp_path_factory.mktemp("quiet"), 200)


def recorded(folder: Path) -> list[dict[str, Any]]:
    """Returns what rank 0 of the plain program has recorded."""
    path = folder / "records.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def submit_plain(
    cluster: Cluster,
    folder: Path,
    *arguments: object,
    save_every: int = SAVE_EVERY,
    step_s: float = 0.05,
    launcher: str = "srun",
    more: tuple[str, ...] = (),
) -> Run:
    program = ["python", PLAIN, NUM_STEPS, save_every, *arguments]
    render = (*LONG, "--launcher", launcher, *more)
    return submit_program(cluster, folder, program, step_s=step_s, render=render)


def check_complete(run: Run, num_attempts: int) -> None:
    """Checks that the run was completed in the same job, with this number of attempts."""
    end = run.end(END_S)
    assert (end.state, end.exit_code) == ("COMPLETED", 0), run.log
    assert run.state.startswith("done"), run.log
    check_attempts(run, num_attempts)


def check_attempts(run: Run, num_attempts: int) -> None:
    """Checks the number of attempts, that Slurm has not requeued the job, and that no process is left."""
    assert [(number, job) for number, job, _ in run.attempts] == [
        (number + 1, run.job) for number in range(num_attempts)
    ], run.log
    assert run.cluster.job(run.job)["Restarts"] == "0", run.log
    assert jobs_of(run) == [run.job]
    run.check_nothing_left()


def jobs_of(run: Run) -> list[str]:
    """Returns all jobs that were submitted in the directory of the run, including those that have ended."""
    done = run.cluster.run(["squeue", "--noheader", "--states=all", "--format=%i %Z"])
    done.check_returncode()
    return sorted(
        job for job, folder in map(str.split, done.stdout.splitlines()) if folder == str(run.folder)
    )


# A program that knows nothing of ddp-hpc


@pytest.mark.parametrize("launcher", ["srun", "mpiexec"])
@pytest.mark.parametrize("failure", ["kill", "raise"])
def test_a_plain_program_that_fails_once_is_complete_in_the_same_job(
    cluster: Cluster, checksum: str, tmp_path: Path, failure: str, launcher: str
) -> None:
    run = submit_plain(cluster, tmp_path, failure, 13, launcher=launcher)
    check_complete(run, 2)
    records = recorded(tmp_path)
    assert records[-1]["checksum"] == checksum
    assert [record["step"] for record in records[:-1]] == [*range(1, 13), *range(11, NUM_STEPS + 1)]
    failed_s = float((tmp_path / "failed").read_text())
    again = next(record for record in records if record["began_s"] > failed_s)
    restarted_s, next_step_s = again["began_s"] - failed_s, again["at_s"] - failed_s
    print(f"from the failure: {restarted_s:.1f} s to the next start, {next_step_s:.1f} s to the next step")
    assert restarted_s < MOST_S


@pytest.mark.soak
def test_torchrun_restarts_a_killed_rank_of_a_plain_program_itself(
    cluster: Cluster, checksum: str, tmp_path: Path
) -> None:
    run = submit_plain(cluster, tmp_path, "kill", 13, launcher="torchrun")
    check_complete(run, 1)
    assert recorded(tmp_path)[-1]["checksum"] == checksum


@pytest.mark.parametrize(
    ("failure", "launcher"),
    [
        ("loop", "srun"),
        ("skip", "torchrun"),
        pytest.param("skip", "srun", marks=pytest.mark.soak),
        pytest.param("loop", "torchrun", marks=pytest.mark.soak),
        pytest.param("loop", "mpiexec", marks=pytest.mark.soak),
        pytest.param("skip", "mpiexec", marks=pytest.mark.soak),
        pytest.param("stop", "srun", marks=pytest.mark.soak),
        pytest.param("stop", "torchrun", marks=pytest.mark.soak),
    ],
)
def test_a_plain_program_that_hangs_once_is_complete_in_the_same_job(
    cluster: Cluster, checksum: str, tmp_path: Path, failure: str, launcher: str
) -> None:
    run = submit_plain(cluster, tmp_path, failure, 13, launcher=launcher, more=("--idle-timeout", "20"))
    check_complete(run, 2)
    assert recorded(tmp_path)[-1]["checksum"] == checksum
    [line] = [line for line in run.log.splitlines() if line.startswith("ddp-hpc: terminating ")]
    rank_0, rank_1 = (
        rf"rank {rank} on {cluster.node_names[rank]} [a-z ,]+ in plain_training.py:{line_of(mark)} "
        for rank, mark in enumerate(("the other ranks", f"`{failure}`"))
    )
    assert re.search(rank_0, line), line
    assert re.search(rank_1, line), line


def line_of(mark: str) -> int:
    """Returns the number of the line of the plain program that is marked as the line of something."""
    lines = PLAIN.read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.endswith(f"# the line of {mark}"))


def test_a_plain_program_that_fails_in_the_same_step_again_ends_with_its_own_error(
    cluster: Cluster, tmp_path: Path
) -> None:
    run = submit_plain(cluster, tmp_path, "raise-always", 13)
    end = run.end(END_S)
    assert (end.state, end.exit_code) == ("FAILED", 1), run.log
    assert run.state.startswith("failed 10 "), run.log
    assert "the run has failed twice after the same checkpoint" in run.state
    assert run.log.count("\nValueError: planted in step 13\n") == 2
    check_attempts(run, 2)


@pytest.mark.parametrize("failure", ["kill", "raise"])
def test_a_plain_program_without_checkpoints_is_not_started_again(
    cluster: Cluster, tmp_path: Path, failure: str
) -> None:
    run = submit_plain(cluster, tmp_path, failure, 3, save_every=0)
    end = run.end(END_S)
    assert end.state == "FAILED", run.log
    assert end.exit_code == {"kill": 137, "raise": 1}[failure], run.log
    assert run.state.startswith("failed 0 "), run.log
    check_attempts(run, 1)


@pytest.mark.parametrize("limit", [1, 2])  # with 2, also its helper, which ends the ranks
def test_a_killed_srun_leaves_no_rank_that_trains_beside_those_of_the_restart(
    cluster: Cluster, checksum: str, tmp_path: Path, limit: int
) -> None:
    run = submit_plain(cluster, tmp_path, step_s=0.3)
    wait_for("step 8", lambda: len(recorded(tmp_path)) >= 8, 60, 0.1)
    assert run.kill("^srun --nodes", limit=limit)
    check_complete(run, 2)
    records = recorded(tmp_path)
    assert records[-1]["checksum"] == checksum
    assert ["checksum" in record for record in records].count(True) == 1, "the first ranks ran to their end"
    began = [record["began_s"] for record in records[:-1]]
    assert began == sorted(began), "the ranks of both attempts trained at the same time"


BEATS = "while :; do date +%s.%N >> beats; sleep 0.2; done"
STEP = "srun --overlap --nodes=1 --ntasks=1"


@pytest.mark.parametrize("where", ["script", "login node"])
def test_other_steps_of_the_job_go_on_when_the_ranks_of_a_killed_srun_are_ended(
    cluster: Cluster, checksum: str, tmp_path: Path, where: str
) -> None:
    monitor = tmp_path / "monitor.sh"
    monitor.write_text(f"cd {tmp_path}; {BEATS}\n")
    setup = ("--setup", f"{STEP} bash {monitor} &") if where == "script" else ()
    program = ["python", PLAIN, NUM_STEPS, SAVE_EVERY]
    run = submit_program(cluster, tmp_path, program, step_s=0.3, render=(*LONG, *setup))
    wait_for("step 1", lambda: recorded(tmp_path), 60, 0.1)
    if where == "login node":
        words = [*STEP.split(), f"--jobid={run.job}", "bash", str(monitor)]
        shell = f"setsid --fork {shlex.join(words)} > {tmp_path}/step.log 2>&1"
        cluster.run(["bash", "-c", shell], cwd=tmp_path).check_returncode()
    wait_for("the other step", (tmp_path / "beats").exists, 60, 0.1)
    wait_for("step 8", lambda: len(recorded(tmp_path)) >= 8, 60, 0.1)
    assert run.kill("^srun --nodes=2", limit=2)
    check_complete(run, 2)
    records = recorded(tmp_path)
    assert records[-1]["checksum"] == checksum
    last_beat_s = float((tmp_path / "beats").read_text().split()[-1])
    assert last_beat_s > records[-2]["at_s"] - 1.0, "the other step was ended with the ranks"


def test_a_user_who_cancels_the_step_of_the_ranks_has_them_started_again(
    cluster: Cluster, checksum: str, tmp_path: Path
) -> None:
    """scancel(1): only this step is cancelled, and the script goes on."""
    run = submit_plain(cluster, tmp_path, step_s=0.3)
    wait_for("step 8", lambda: len(recorded(tmp_path)) >= 8, 60, 0.1)
    cluster.run(["scancel", f"{run.job}.0"]).check_returncode()
    check_complete(run, 2)
    assert recorded(tmp_path)[-1]["checksum"] == checksum


# ddp_hpc.train


def test_a_stopped_rank_is_named_and_its_run_is_complete_in_the_same_job(
    cluster: Cluster, quiet: list[tuple[int, float]], tmp_path: Path
) -> None:
    limit = ("--hang-timeout", "15")
    run = submit(cluster, tmp_path, *SAVING, *limit, num_steps=NUM_STEPS, step_s=0.2, render=LONG)
    run.wait_for_step(10)
    run.kill_rank(1, "STOP")
    check_complete(run, 2)
    assert run.losses == quiet[:NUM_STEPS]
    assert run.attempts[1][2] >= 10
    [line] = [line for line in run.log.splitlines() if "ddp-hpc: restart 1 of 3 in this job" in line]
    assert f"rank 1 on {cluster.node_names[1]}" in line


@pytest.mark.soak
def test_torchrun_restarts_a_stopped_rank_itself(
    cluster: Cluster, quiet: list[tuple[int, float]], tmp_path: Path
) -> None:
    limit = ("--hang-timeout", "15")
    run = submit(cluster, tmp_path, *SAVING, *limit, num_steps=NUM_STEPS, step_s=0.2, render=TORCHRUN)
    run.wait_for_step(10)
    run.kill_rank(1, "STOP")
    check_complete(run, 1)
    assert run.losses == quiet[:NUM_STEPS]
    assert f"rank 1 on {cluster.node_names[1]}" in run.log


def test_torchrun_restarts_a_killed_rank_itself(
    cluster: Cluster, quiet: list[tuple[int, float]], tmp_path: Path
) -> None:
    run = submit(cluster, tmp_path, *SAVING, num_steps=NUM_STEPS, step_s=0.2, render=TORCHRUN)
    run.wait_for_step(10)
    run.kill_rank(1)
    check_complete(run, 1)
    assert run.losses == quiet[:NUM_STEPS]


@pytest.mark.parametrize("limit", [1, 2])  # the agent's parent, which ends with its child, or both
def test_lost_agents_of_torchrun_are_started_again_by_the_supervisor(
    cluster: Cluster, quiet: list[tuple[int, float]], tmp_path: Path, limit: int
) -> None:
    run = submit(cluster, tmp_path, *SAVING, num_steps=NUM_STEPS, step_s=0.2, render=TORCHRUN)
    run.wait_for_step(10)
    for node_rank in (0, 1):
        assert run.kill(AGENT, node_rank, limit=limit)
    check_complete(run, 2)
    assert run.losses == quiet[:NUM_STEPS]


# The user, and the supervisor itself


@pytest.mark.parametrize("moment", ["attempt", "restart"])
def test_a_cancelled_job_is_neither_restarted_nor_requeued(
    cluster: Cluster, quiet: list[tuple[int, float]], tmp_path: Path, moment: str
) -> None:
    run = submit(cluster, tmp_path, *SAVING, num_steps=200, step_s=0.2, render=LONG)
    run.wait_for_step(10)
    if moment == "restart":
        run.kill_rank(1)
        run.wait_for_words("ddp-hpc: restart 1 of 3 in this job")
    cluster.run(["scancel", run.job]).check_returncode()
    assert cluster.wait(run.job).state == "CANCELLED"
    check_attempts(run, {"attempt": 1, "restart": 2}[moment])
    assert run.state.startswith("requeue "), run.state
    assert "no other job is submitted; to resume: cd " in run.log
    step = int(run.state.split()[1])
    assert step >= 10
    assert run.losses[:step] == quiet[:step]


def test_a_killed_supervisor_leaves_no_rank_and_nothing_is_submitted_twice(
    cluster: Cluster, quiet: list[tuple[int, float]], tmp_path: Path
) -> None:
    run = submit(cluster, tmp_path, *SAVING, num_steps=NUM_STEPS, step_s=0.2, render=LONG)
    run.wait_for_step(10)
    assert run.kill(SUPERVISOR)
    end = run.end(END_S)
    assert (end.state, end.exit_code) == ("FAILED", 137), run.log
    check_attempts(run, 1)
    assert run.state.split()[0] in ("requeue", "running"), run.state
    again = resubmit(run)
    assert cluster.wait(again.job, END_S).state == "COMPLETED", again.log
    assert run.losses == quiet[:NUM_STEPS]
    cluster.run(["scancel", run.job])


@pytest.mark.soak
@pytest.mark.parametrize("later_s", [0.0, 0.5, 1.0, 2.0, 4.0])
def test_a_job_that_is_cancelled_after_a_failure_is_not_restarted_again(
    cluster: Cluster, quiet: list[tuple[int, float]], tmp_path: Path, later_s: float
) -> None:
    run = submit(cluster, tmp_path, *SAVING, num_steps=200, step_s=0.2, render=LONG)
    run.wait_for_step(15)
    run.kill_rank(1)
    time.sleep(later_s)
    cluster.run(["scancel", run.job]).check_returncode()
    assert cluster.wait(run.job).state == "CANCELLED"
    check_attempts(run, len(run.attempts))
    assert len(run.attempts) <= 2
    step = int(run.state.split()[1])
    # Steps 5, 10 and 15 are saved, and a save waits for the previous one, so that of step 5 is complete.
    assert step >= 5
    assert run.losses[:step] == quiet[:step]


# What is killed: words of its command line, and the rank of the node.
PROGRAM = r"^[^ ]*python[^ ]* (-u )?[^ ]*(slow|plain)_training.py"
VICTIMS = {
    "rank 0": (PROGRAM, 0),
    "rank 1": (PROGRAM, 1),
    "parent of rank 0": ("^[^ ]*python[^ ]* [^ ]*ddp-hpc exec", 0),
    "parent of rank 1": ("^[^ ]*python[^ ]* [^ ]*ddp-hpc exec", 1),
    "agent 0": (AGENT, 0),
    "agent 1": (AGENT, 1),
    "launcher": ("^srun --nodes", 0),
    "supervisor": (SUPERVISOR, 0),
}
NUM_KILLS = 5


def kill_at_random(run: Run, chance: random.Random, step_s: float, steps: range, records: str) -> list[str]:
    """Kills processes until the run is complete; returns the jobs of the run.

    Most kills come after some `steps`, of which the file `records` has one line each, and others
    while the ranks start. A job that ends is submitted again, as a user does, unless it has requeued itself.
    """
    jobs, kills = [run.job], []
    while not run.state.startswith("done"):
        if has_ended(run):
            run.check_nothing_left()
            run = resubmit(run, step_s)
            jobs.append(run.job)
        run.cluster.start_requeued(run.job)
        if len(kills) == NUM_KILLS:
            time.sleep(1.0)
            continue
        if not kills or chance.random() < 0.7:
            wait_for_steps(run, chance.choice(steps), records)
        else:
            time.sleep(chance.uniform(1.0, 5.0))
        # Not all of them exist with each launcher. The first kill is one after which the ranks start again.
        victims = chance.sample(list(VICTIMS), len(VICTIMS)) if kills else ["rank 1"]
        kills += next(([name] for name in victims if run.kill(*VICTIMS[name])), [])
    print(kills, run.attempts)
    assert run.cluster.wait(run.job).state == "COMPLETED"
    assert len(kills) == NUM_KILLS
    return jobs


def wait_for_steps(run: Run, num_steps: int, records: str) -> None:
    """Waits until this number of steps is added to the file, or the job has ended."""

    def count() -> int:
        path = run.folder / records
        return len(path.read_text().splitlines()) if path.exists() else 0

    goal = count() + num_steps
    wait_for("steps", lambda: count() >= goal or has_ended(run), 120, 0.2)


def check_random_kills(run: Run, seed: int, step_s: float, steps: range, records: str) -> None:
    jobs = kill_at_random(run, random.Random(seed), step_s, steps, records)
    first_steps = [step for _, _, step in run.attempts]
    assert first_steps == sorted(first_steps), "a checkpoint was lost"
    assert jobs_of(run) == sorted(jobs), "a job was submitted twice"
    run.check_nothing_left()


@pytest.mark.soak
@pytest.mark.parametrize(("launcher", "seed"), [("srun", 0), ("srun", 1), ("torchrun", 2)])
def test_random_kills_of_a_training_lose_and_repeat_nothing(
    cluster: Cluster, quiet: list[tuple[int, float]], tmp_path: Path, launcher: str, seed: int
) -> None:
    render = (*LONG, "--max-attempts", "100", "--launcher", launcher)
    run = submit(cluster, tmp_path, *SAVING, num_steps=200, step_s=0.2, render=render)
    check_random_kills(run, seed, 0.2, range(6, 16), "metrics.jsonl")
    assert run.losses == quiet
    assert launcher == "torchrun" or run.attempts[1][:2] == (2, run.job), "torchrun restarts ranks itself"


@pytest.mark.soak
def test_random_kills_of_a_plain_program_lose_nothing_and_never_run_two_attempts_at_once(
    cluster: Cluster, checksum: str, tmp_path: Path
) -> None:
    run = submit_plain(cluster, tmp_path, step_s=2.0, save_every=1)
    check_random_kills(run, 3, 2.0, range(1, 3), "records.jsonl")
    records = recorded(tmp_path)
    assert records[-1].get("checksum", "") == checksum
    began = [record["began_s"] for record in records[:-1]]
    assert began == sorted(began)
    assert run.attempts[1][0] == 2


def has_ended(run: Run) -> bool:
    state = run.cluster.job(run.job)["JobState"]
    return state not in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING")
