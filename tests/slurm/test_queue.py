"""submit, status, logs, cancel and the post-mortem on a real Slurm."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from . import submission
from .cluster import Cluster
from .configuration import Settings, has_cgroup_v1
from .nodes import wait_for
from .survival_runs import OPTIONS, PROJECT, PYTHON

pytestmark = pytest.mark.slurm

REQUEST = [*submission.REQUEST, "--nodes", "2", "--ranks-per-node", "1"]
# Prints the trainer's messages without training: the first attempt runs out of time, the second completes.
TRAINER = """#!/bin/bash
if [[ $SLURM_PROCID != 0 ]]; then exit 0; fi
read -r _ step _ <"$DDP_HPC_RUN_DIR/state" 2>/dev/null || step=0
say() { echo "$*" >"$DDP_HPC_RUN_DIR/.state"; mv "$DDP_HPC_RUN_DIR/.state" "$DDP_HPC_RUN_DIR/state"; }
say running "$step"
echo "epoch 1/1 step $((step + 10))/20 loss 0.5 8.0 samples/s eta 0:00:07"
sleep 1
if [[ $step == 0 ]]; then say requeue 10 no time left; exit 75; fi
say done 20
"""
# Rank 1 raises an exception, and rank 0 would run longer.
# Like the trainer, rank 1 exits a second after its last line, because srun of Slurm 22.05 can lose lines that
# are written right before the end of a task.
RAISES = """
import os, sys, time, traceback
if os.environ["SLURM_PROCID"] == "1":
    try:
        raise ValueError(f"bad data in attempt {1 + int(os.environ.get('SLURM_RESTART_COUNT', 0))}")
    except ValueError:
        traceback.print_exc()
        time.sleep(1)
        sys.exit(1)
time.sleep(30)
"""
# Allocates memory on the second node until the kernel kills it.
GREEDY = "if [[ $SLURM_PROCID == 1 ]]; then exec python3 -c 'bytearray(600 * 2**20)'; else sleep 30; fi"


def start(
    cluster: Cluster, folder: Path, *args: str | Path, env: dict[str, str] | None = None
) -> subprocess.Popen[str]:
    """Starts `ddp-hpc ARGS` on the head node in this directory."""
    argv = cluster.command([PYTHON, "-m", "ddp_hpc", *args], cwd=folder)
    environ = cluster.environment({"PYTHONPATH": str(PROJECT), **(env or {})})
    return subprocess.Popen(argv, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ddp_hpc(
    cluster: Cluster, folder: Path, *args: str | Path, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    process = start(cluster, folder, *args, env=env)
    out, err = process.communicate(timeout=120)
    return subprocess.CompletedProcess(list(map(str, args)), process.returncode, out, err)


def submit(cluster: Cluster, folder: Path, *args: str | Path, env: dict[str, str] | None = None) -> str:
    done = ddp_hpc(cluster, folder, "submit", *args, env=env)
    assert done.returncode == 0, done.stderr
    job_id = done.stdout.removesuffix("\n")
    assert job_id.isdecimal(), done.stdout
    return job_id


def status(cluster: Cluster, folder: Path, job_id: str) -> dict[str, Any]:
    done = ddp_hpc(cluster, folder, "status", job_id, "--json")
    found: dict[str, Any] = json.loads(done.stdout)
    return {**found, "exit": done.returncode}


def write_script(folder: Path, body: str, *directives: str) -> Path:
    lines = "".join(
        f"#SBATCH {one}\n" for one in ("--nodes=2", "--ntasks-per-node=1", "--time=5", *directives)
    )
    path = folder / "job.sh"
    path.write_text(f"#!/bin/bash\n{lines}{body}\n")
    return path


def end_soon(cluster: Cluster, job_id: str) -> None:
    """Shortens the walltime of a running job, as root may, so that it ends in a moment."""
    wait_for("start of the job", lambda: cluster.job(job_id)["JobState"] == "RUNNING")
    at = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + 2))
    cluster.run(["scontrol", "update", f"jobid={job_id}", f"EndTime={at}"]).check_returncode()


@pytest.mark.check
def test_a_submitted_request_trains_and_its_log_is_followed_to_the_end(
    cluster: Cluster, tmp_path: Path
) -> None:
    training = ["python", "-m", "ddp_hpc.train", *OPTIONS, "--max-steps", "12", "--log-every", "4"]
    request = [*REQUEST, "--ranks-per-node", "2", "--", *training]
    rendered = ddp_hpc(cluster, tmp_path, "render", "--python-env", sys.prefix, *request).stdout
    env = {"PYTHONPATH": str(PROJECT)}
    job_id = submit(cluster, tmp_path, *request, env=env)
    script = cluster.run(["scontrol", "write", "batch_script", job_id, "-"]).stdout
    assert script == rendered
    done = ddp_hpc(cluster, tmp_path, "logs", job_id, "--follow")
    assert done.returncode == 0, done.stderr
    assert done.stdout == cluster.job_output(job_id)
    assert "4 ranks on 2 nodes (slurm), gloo on cpu" in done.stdout
    assert "first node of the job" in done.stdout
    assert "done: 12 steps" in done.stdout
    assert done.stderr.splitlines()[-1] == f"-- job {job_id}: done"
    found = status(cluster, tmp_path, job_id)
    assert (found["verdict"], found["exit"], found["post_mortem"]) == ("done", 0, None)
    assert (found["progress"]["step"], found["progress"]["num_steps"]) == (12, 12)
    assert found["state"]["state"] == "done"
    assert [one["job_id"] for one in found["attempts"]] == [job_id]
    assert found["submission"]["sha256"]


@pytest.mark.check
def test_the_exception_of_the_last_attempt_of_any_program_is_shown(cluster: Cluster, tmp_path: Path) -> None:
    """The exit code of the job is that of rank 0, which srun terminates."""
    (tmp_path / "program.py").write_text(RAISES)
    body = """srun --ntasks=2 --kill-on-bad-exit=1 python3 program.py
code=$?
if [[ ! $SLURM_RESTART_COUNT ]]; then scontrol requeue $SLURM_JOB_ID; sleep 30; fi
exit $code"""
    job_id = submit(cluster, tmp_path, write_script(tmp_path, body, "--open-mode=append").name)
    end = cluster.wait(job_id, requeues_at_once=True)
    assert end.exit_code != 1
    dead = status(cluster, tmp_path, job_id)["post_mortem"]
    assert dead["cause"] == "failed"
    assert dead["lines"][0] == "Traceback (most recent call last):"
    assert dead["lines"][-1] == "ValueError: bad data in attempt 2"


@pytest.mark.check
def test_the_rank_of_a_rendered_script_that_failed_first_is_read_from_its_run_directory(
    cluster: Cluster, tmp_path: Path
) -> None:
    (tmp_path / "program.py").write_text(RAISES)
    job_id = submit(cluster, tmp_path, *REQUEST, "--", "python", "program.py")
    cluster.wait(job_id)
    found = status(cluster, tmp_path, job_id)
    dead = found["post_mortem"]
    recorded = json.loads((Path(found["run_dir"]) / "end").read_text())
    assert (recorded["rank"], recorded["exit_code"]) == (1, 1)
    assert (dead["cause"], dead["rank"], dead["host"]) == ("failed", 1, cluster.node_names[1])
    assert dead["what"].startswith("exit code 1; rank 1 on ")
    assert "ValueError: bad data in attempt 1" in dead["lines"]


@pytest.mark.check
@pytest.mark.skipif(
    not has_cgroup_v1(), reason="memory is no limit without cgroups v1, which Slurm here needs"
)
def test_an_out_of_memory_kill_is_named(tmp_path: Path) -> None:
    (tmp_path / "greedy.sh").write_text(GREEDY)
    body = "srun --ntasks=2 --kill-on-bad-exit=1 bash greedy.sh"
    with Cluster(Settings(cgroups=True)) as cluster:
        job_id = submit(cluster, tmp_path, write_script(tmp_path, body, "--mem=200").name)
        end = cluster.wait(job_id)
        dead = status(cluster, tmp_path, job_id)["post_mortem"]
    assert end.state == "FAILED", "the batch script ended by itself, so Slurm's state is not OUT_OF_MEMORY"
    assert dead["cause"] == "memory"
    assert "request more memory per node" in dead["remedy"]


@pytest.mark.soak  # Slurm checks time limits twice a minute; tests/queue tests its messages
def test_a_walltime_kill_is_named(cluster: Cluster, tmp_path: Path) -> None:
    job_id = submit(cluster, tmp_path, write_script(tmp_path, "srun --ntasks=2 sleep 60").name)
    end_soon(cluster, job_id)
    assert cluster.wait(job_id).state == "TIMEOUT"
    wait_for("slurmd's last word", lambda: "JOB" in cluster.job_output(job_id), 30)
    found = status(cluster, tmp_path, job_id)
    assert (found["verdict"], found["exit"]) == ("failed", 1)
    dead = found["post_mortem"]
    assert (dead["cause"], dead["rank"]) == ("walltime", None)
    assert dead["what"].startswith("it reached its walltime of 00:0")
    assert any("DUE TO TIME LIMIT" in line for line in dead["lines"])


@pytest.mark.check
def test_a_run_is_followed_while_it_waits_and_after_a_requeue(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "trainer.sh").write_text(TRAINER)
    first = cluster.sbatch("#!/bin/bash\nsleep 60\n", "--nodes=2", "--exclusive")
    job_id = submit(cluster, tmp_path, *REQUEST, "--", "bash", "trainer.sh")
    following = start(cluster, tmp_path, "logs", job_id, "--follow")
    try:
        assert following.stderr is not None
        assert following.stderr.readline().startswith(f"-- job {job_id} has not started")
        waits = status(cluster, tmp_path, job_id)
        assert (waits["verdict"], waits["exit"]) == ("waiting", 0)
        cluster.run(["scancel", first]).check_returncode()
        wait_for("requeued job", lambda: cluster.start_requeued(job_id), 60)
        out, err = following.communicate(timeout=90)
    finally:
        following.kill()
    assert following.returncode == 0, err
    assert [line for line in out.splitlines() if line.startswith("epoch")] == [
        "epoch 1/1 step 10/20 loss 0.5 8.0 samples/s eta 0:00:07",
        "epoch 1/1 step 20/20 loss 0.5 8.0 samples/s eta 0:00:07",
    ]
    assert out == cluster.job_output(job_id)
    assert err.splitlines()[-1] == f"-- job {job_id}: done"
    assert [one["number"] for one in status(cluster, tmp_path, job_id)["attempts"]] == [1, 2]


def test_only_its_owner_can_cancel_a_job_and_only_once(cluster: Cluster, tmp_path: Path) -> None:
    job_id = submit(cluster, tmp_path, write_script(tmp_path, "sleep 60").name)
    # The capability lets `nobody` read this Python in any directory. For Slurm, the user is still `nobody`.
    nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    nobody += ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
    argv = [*nobody, PYTHON, "-m", "ddp_hpc", "cancel", job_id]
    other = cluster.run(argv, env={"PYTHONPATH": str(PROJECT)}, cwd="/tmp")
    assert (other.returncode, other.stdout) == (1, "")
    refusal = f"scancel: error: Kill job error on job id {job_id}: Access/permission denied"
    assert other.stderr == (
        f"error: {refusal} (job {job_id} of root was not cancelled); "
        "only its owner or the site can cancel it\n"
    )
    done = ddp_hpc(cluster, tmp_path, "cancel", job_id)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{job_id}\n", "")
    assert cluster.wait(job_id).state == "CANCELLED"
    again = ddp_hpc(cluster, tmp_path, "cancel", job_id)
    assert (again.returncode, again.stdout, again.stderr) == (
        0,
        "",
        f"job {job_id} has already ended (CANCELLED)\n",
    )
    found = status(cluster, tmp_path, job_id)
    assert (found["verdict"], found["exit"]) == ("cancelled", 1)
