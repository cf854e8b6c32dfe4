"""Ranks and nodes that fail in a rehearsal (--fail), and what the job does about it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Launch
from tests.rehearse.conftest import Rehearse

Script = Callable[..., Path]

# Records a checkpoint, and is complete when ranks are started again: when more than the first two have begun.
PROGRAM = """
import os, time
from pathlib import Path

with open("starts", "a") as starts:
    starts.write("x")
Path(os.environ["DDP_HPC_PROGRESS_FILE"]).touch()
while len(Path("starts").read_text()) < 3:
    time.sleep(0.1)
print("has completed", flush=True)
"""
PROFILES = {
    "srun": "generic_slurm",
    "torchrun": "generic_slurm",
    "mpiexec": 'extends = "generic_pbs"\nchecked = "2026-11-28"\n[launch]\ndialect = "hydra"\n',
}
# Lines about simulated nodes and processes of stand-ins, which mean nothing to the user.
NOISE = (
    "no answer yet",
    "killed processes that outlived the launcher",
    "not nodes of this job",
    "the srun that monitors",
)


def rendered(launch: Launch, directory: Path, launcher: str, *options: str) -> Path:
    """The script for PROGRAM with one rank on each of two nodes."""
    profile = PROFILES[launcher]
    if "\n" in profile:
        (directory / "site.toml").write_text(profile)
        profile = "./site.toml"
    (directory / "train.py").write_text(PROGRAM)
    words = ["--profile", profile, "--launcher", launcher, "--nodes", "2", "--ranks-per-node", "1"]
    words += ["--walltime", "01:00:00", *options, "-o", "job.sh", "--", "python", "train.py"]
    done = launch(["ddp-hpc", "render", *words], cwd=directory)
    assert done.exit_code == 0, done.stderr
    return directory / "job.sh"


def test_the_last_rank_is_killed(rehearse: Rehearse, script: Script) -> None:
    job = script("slurm", "--nodes=2", "srun --kill-on-bad-exit=1 sleep 60")
    done = rehearse(job, "--fail", "rank", "--fail-after-s", "0")
    assert done.exit_code == 1
    assert (
        "rehearse: the last rank on node2 is killed (--fail rank); no snapshot or checkpoint was recorded "
        "before\n"
    ) in done.stdout
    assert "srun: error: node2: task 1: Killed\n" in done.stdout


@pytest.mark.check
@pytest.mark.parametrize(
    ("launcher", "expected"),
    [
        ("srun", "because attempt 1 failed: rank 1 on node2 was killed by SIGKILL"),
        ("mpiexec", "because attempt 1 failed: rank 1 on node2 was killed by SIGKILL"),
        ("torchrun", "failed (exitcode: -9)"),
    ],
)
def test_after_a_rank_was_killed_the_run_is_resumed(
    rehearse: Rehearse, launch: Launch, tmp_path: Path, launcher: str, expected: str
) -> None:
    """torchrun's agents start their ranks again themselves."""
    done = rehearse(rendered(launch, tmp_path, launcher), "--fail", "rank", timeout_s=120.0)
    log = done.stdout + done.stderr
    assert done.exit_code == 0, log
    assert log.count("is killed (--fail rank)") == 1
    assert expected in log
    assert log.count("has completed") == 2


@pytest.mark.check
@pytest.mark.parametrize("launcher", ["srun", "mpiexec", "torchrun"])
def test_a_lost_node_is_replaced_by_the_spare_one(
    rehearse: Rehearse, launch: Launch, tmp_path: Path, launcher: str
) -> None:
    job = rendered(launch, tmp_path, launcher, "--spare-nodes", "1")
    done = rehearse(job, "--fail", "node", "--args", "x", timeout_s=180.0)
    log = done.stdout + done.stderr
    assert done.exit_code == 0, log
    name = "{}.rehearsal" if launcher == "mpiexec" else "{}"
    second, third = (name.format(node) for node in ("node2", "node3"))
    assert f"rehearse: {second} no longer answers, and its ranks are stopped (--fail node)\n" in log
    assert f"ddp-hpc: no answer from {second}; replaced by {third}\n" in log
    assert f"ddp-hpc: restart 1 of 3 in this job, because attempt 1 failed: {second} does not answer\n" in log
    assert [line for line in log.splitlines() if any(noise in line for noise in NOISE)] == []
    assert log.count("has completed") == 2


@pytest.mark.check
def test_a_training_run_begins_again_if_a_node_is_lost_before_the_first_snapshot(
    rehearse: Rehearse, launch: Launch, tmp_path: Path
) -> None:
    options = ("--profile", "generic_slurm", "--nodes", "2", "--ranks-per-node", "1", "--spare-nodes", "1")
    ended = launch(["ddp-hpc", "render", *options, "-o", "job.sbatch"], cwd=tmp_path)
    assert ended.exit_code == 0, ended.stderr
    words = ("--fail", "node", "--fail-after-s", "1", "--steps", "20", "--args", "--model linear")
    done = rehearse(tmp_path / "job.sbatch", *words, timeout_s=180.0)
    log = done.stdout + done.stderr
    assert done.exit_code == 0, log
    assert "(--fail node); no snapshot or checkpoint was recorded before\n" in log
    assert "ddp-hpc: restart 1 of 3 in this job, because attempt 1 failed: node2 does not answer\n" in log
    assert "done: 20 steps, " in log


@pytest.mark.check
def test_a_lost_node_is_left_out(rehearse: Rehearse, launch: Launch, tmp_path: Path) -> None:
    done = rehearse(rendered(launch, tmp_path, "srun", "--min-nodes", "1"), "--fail", "node", timeout_s=180.0)
    log = done.stdout + done.stderr
    assert done.exit_code == 0, log
    assert "no answer from node2; the ranks use 1 node instead of 2 (--min-nodes)" in log
    assert log.count("has completed") == 1


@pytest.mark.check
def test_a_rank_that_hangs_is_named(rehearse: Rehearse, launch: Launch, tmp_path: Path) -> None:
    job = rendered(launch, tmp_path, "srun", "--idle-timeout", "6")
    done = rehearse(job, "--fail", "hang", timeout_s=120.0)
    log = done.stdout + done.stderr
    assert done.exit_code == 0, log
    assert "rehearse: the last rank on node2 is stopped with SIGSTOP; nothing more happens until " in log
    assert "rank 1 on node2 cannot continue because its process is stopped" in log
    assert log.count("has completed") == 2


@pytest.mark.check
def test_a_run_that_is_complete_does_not_fail(rehearse: Rehearse, launch: Launch, tmp_path: Path) -> None:
    options = ("--profile", "generic_slurm", "--nodes", "2", "-o", "job.sbatch")
    ended = launch(["ddp-hpc", "render", *options], cwd=tmp_path)
    assert ended.exit_code == 0, ended.stderr
    done = rehearse(tmp_path / "job.sbatch", "--fail", "rank", "--steps", "2")
    assert done.exit_code == 1, done.stdout + done.stderr
    assert "--fail rank: nothing has failed, because no ranks ran long enough, or the run was" in done.stderr


@pytest.mark.check
def test_a_rehearsal_in_which_nothing_fails_is_not_successful(rehearse: Rehearse, script: Script) -> None:
    done = rehearse(script("slurm", "--nodes=2", "srun true"), "--fail", "hang")
    assert done.exit_code == 1
    assert "--fail hang: nothing has failed, because no ranks ran long enough" in done.stderr


@pytest.mark.check
def test_a_job_that_the_loss_of_a_node_would_end_is_refused(rehearse: Rehearse, script: Script) -> None:
    done = rehearse(script("slurm", "--nodes=2", "srun true"), "--fail", "node")
    assert done.exit_code == 2
    assert "job.sh cannot lose a node: the scheduler would end the job" in done.stderr
