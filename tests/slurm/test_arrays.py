"""Arguments of job scripts, job arrays and KillWait on a real Slurm."""

from __future__ import annotations

from pathlib import Path

import pytest

from . import submission
from .cluster import Cluster
from .survival_runs import PROJECT
from .test_queue import ddp_hpc, status

pytestmark = [pytest.mark.slurm, pytest.mark.check]

REQUEST = [*submission.REQUEST, "--nodes", "1", "--ranks-per-node", "1"]
ENVIRONMENT = {"PYTHONPATH": str(PROJECT)}
# Stops after its first attempt and completes in its second. Prints its arguments.
PROGRAM = """#!/bin/bash
say() { echo "$*" >"$DDP_HPC_RUN_DIR/.state"; mv "$DDP_HPC_RUN_DIR/.state" "$DDP_HPC_RUN_DIR/state"; }
read -r _ step _ <"$DDP_HPC_RUN_DIR/state" 2>/dev/null || step=0
echo "arguments: $* in ${DDP_HPC_RUN_DIR#"$PWD"/} after $step, killed after $DDP_HPC_KILL_DELAY_S s"
if [[ $1 != once && $step == 0 ]]; then say requeue 10 no time left; exit 75; fi
say done 20
"""


def write(cluster: Cluster, folder: Path, *options: str) -> Path:
    """Writes a rendered script that runs PROGRAM."""
    program = folder / "program.sh"
    program.write_text(PROGRAM)
    job = folder / "job.sbatch"
    done = ddp_hpc(cluster, folder, "render", *REQUEST, *options, "-o", job, "--", "bash", program.name)
    assert done.returncode == 0, done.stderr
    return job


def submit_with(cluster: Cluster, script: Path, *arguments: str) -> str:
    """Submits a script with arguments, and returns the job ID."""
    words = ["sbatch", "--parsable", script, *arguments]
    done = cluster.run(words, env=ENVIRONMENT, cwd=script.parent)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def lines(cluster: Cluster, job_id: str) -> list[str]:
    return [one for one in cluster.job_output(job_id).splitlines() if one.startswith("arguments: ")]


def test_arguments_after_the_script_reach_the_program_in_each_attempt(
    cluster: Cluster, tmp_path: Path
) -> None:
    job = write(cluster, tmp_path)
    job_id = submit_with(cluster, job, "a b", "--x")
    assert cluster.wait(job_id, requeues_at_once=True).state == "COMPLETED"
    assert [one.partition(" in ")[0] for one in lines(cluster, job_id)] == ["arguments: a b --x"] * 2


def test_each_task_of_an_array_has_its_own_run_and_requeues_only_itself(
    cluster: Cluster, tmp_path: Path
) -> None:
    array = cluster.sbatch(write(cluster, tmp_path), "--array=0-1", env=ENVIRONMENT, cwd=tmp_path)
    for index in (0, 1):
        task = f"{array}_{index}"
        assert cluster.wait(task, requeues_at_once=True).state == "COMPLETED"
        run_dir = tmp_path / "runs" / "ddp" / f"task-{index}"
        starts = (run_dir / "attempts").read_text().splitlines()
        assert [one.rpartition(" ")[0] for one in starts] == [f"1 {task} 0", f"2 {task} 10"]
        found = status(cluster, tmp_path, task)
        assert (found["verdict"], found["run_dir"]) == ("done", str(run_dir))
        assert found["state"]["step"] == 20


def test_the_kill_delay_of_jobs_launch_and_ranks_follows_killwait(cluster: Cluster, tmp_path: Path) -> None:
    kill_wait_s = cluster.settings.kill_wait_s
    assert kill_wait_s != 30, "the default of Slurm"
    job_id = submit_with(cluster, write(cluster, tmp_path), "once")
    assert cluster.wait(job_id).state == "COMPLETED"
    # The supervisor ends the ranks a little earlier, so that it can requeue the job.
    assert lines(cluster, job_id)[0].endswith(f"killed after {0.6 * kill_wait_s:g} s")

    words = ["python", "-m", "ddp_hpc", "launch", "-n", "1", "--", "printenv", "DDP_HPC_KILL_DELAY_S"]
    done = cluster.run(["salloc", "--nodes=1", *words], env=ENVIRONMENT, cwd=tmp_path)
    assert done.stdout.split() == [str(kill_wait_s)], done.stderr

    ask = "import os; from ddp_hpc.schedulers.deadline import kill_delay_s; print(kill_delay_s(os.environ))"
    done = cluster.run(["srun", "--nodes=1", "python", "-c", ask], env=ENVIRONMENT, cwd=tmp_path)
    assert done.stdout.split() == [str(float(kill_wait_s))], done.stderr
