"""Training on two nodes of a real Slurm, with rendered scripts and with commands that users type."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from .cluster import Cluster
from .nodes import wait_for

pytestmark = [pytest.mark.slurm, pytest.mark.check]

PROJECT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
OPTIONS = ["--model", "linear", "--num-samples", "64", "--epochs", "1", "--batch-size", "4"]
OPTIONS += ["--summary", "summary.json", "--init-timeout", "90"]
# All nodes share this machine's cores, but each node would use all of them.
OPTIONS += ["--threads", "1"]
ENVIRONMENT = {"PYTHONPATH": str(PROJECT)}


def _render(cluster: Cluster, folder: Path, *options: str, command: list[str] | None = None) -> Path:
    """Returns the script that `ddp-hpc render` writes, by default for two nodes with one rank each."""
    script = folder / "job.sbatch"
    command = command if command is not None else ["python", "-m", "ddp_hpc.train", *OPTIONS]
    argv = [str(BIN / "python"), "-m", "ddp_hpc", "render", "--profile", "generic_slurm", "--nodes", "2"]
    argv += ["--ranks-per-node", "1", "--walltime", "00:05:00", *options, "-o", str(script), "--", *command]
    done = cluster.run(argv, env=ENVIRONMENT, cwd=folder)
    assert done.returncode == 0, done.stderr
    return script


def _submit_and_wait(cluster: Cluster, script: Path, env: dict[str, str] | None = None) -> str:
    """Submits a job that must succeed, and returns its output."""
    job = cluster.sbatch(script, env=ENVIRONMENT | (env or {}), cwd=script.parent)
    end = cluster.wait(job, timeout=150)
    output = "".join(path.read_text() for path in script.parent.glob(f"*-{job}.out"))
    assert (end.state, end.exit_code) == ("COMPLETED", 0), output
    return output


def _world(folder: Path) -> dict[str, object]:
    return json.loads((folder / "summary.json").read_text())["world"]


def _check(folder: Path, launcher: str, ranks_per_node: int = 1) -> None:
    world = _world(folder)
    found = (world["launcher"], world["world_size"], world["num_nodes"], world["local_size"])
    assert found == (launcher, 2 * ranks_per_node, 2, ranks_per_node)


# test_queue.py tests training with srun.


def test_a_rendered_script_trains_with_mpiexec_in_the_allocation(cluster: Cluster, tmp_path: Path) -> None:
    output = _submit_and_wait(cluster, _render(cluster, tmp_path, "--launcher", "mpiexec"))
    _check(tmp_path, "hydra")
    assert "2 ranks on 2 nodes (hydra), gloo on cpu" in output


def test_a_wrong_option_ends_a_torchrun_job_without_restarts(cluster: Cluster, tmp_path: Path) -> None:
    script = _render(cluster, tmp_path, "--launcher", "torchrun", command=["python", "-m", "ddp_hpc.train"])
    words = ["sbatch", "--parsable", script, "--no-such-option"]
    job = cluster.run(words, env=ENVIRONMENT, cwd=tmp_path).stdout.strip()
    end = cluster.wait(job, timeout=90)
    output = cluster.job_output(job)
    assert (end.state, end.exit_code) == ("FAILED", 2), output
    assert 1 <= output.count("--no-such-option") <= 4, output  # the launch line, and each of the two ranks
    assert "the ranks refused to start, so this start does not count as an attempt" in output


def test_torchrun_script_works_under_srun(cluster: Cluster, tmp_path: Path) -> None:
    env = ENVIRONMENT | {"DDP_HPC_RANKS_PER_NODE": "1"}
    done = cluster.run(
        ["srun", "--nodes=2", "torchrun_script.sh", *OPTIONS], env=env, cwd=tmp_path, timeout=150
    )
    assert done.returncode == 0, done.stdout + done.stderr
    _check(tmp_path, "torchrun")


def test_one_failing_rank_ends_the_step_on_all_nodes(cluster: Cluster, tmp_path: Path) -> None:
    planted = PROJECT / "tests" / "training" / "planted.py"
    argv = ["srun", "--nodes=2", "--ntasks-per-node=1", str(BIN / "python"), str(planted), *OPTIONS]
    done = cluster.run(argv, env=ENVIRONMENT | {"PLANT": "raise:1"}, cwd=tmp_path, timeout=90)
    assert done.returncode != 0
    said = [line for line in done.stderr.splitlines() if line.startswith("[rank ")]
    assert len(said) == 1, done.stderr
    assert said[0].startswith(f"[rank 1/2 {cluster.node_names[1]}]")
    assert "ValueError: planted in one rank" in done.stderr


def test_a_kill_at_the_walltime_ends_the_ranks_and_the_script(cluster: Cluster, tmp_path: Path) -> None:
    endless = ["python", "-m", "ddp_hpc.train", *OPTIONS, "--epochs", "1000000"]
    script = _render(cluster, tmp_path, command=endless)
    job = cluster.sbatch(script, env=ENVIRONMENT, cwd=tmp_path)

    log = tmp_path / f"ddp-{job}.out"
    wait_for("step", lambda: log.exists() and "epoch 1/" in log.read_text(), 60)
    assert cluster.run(["scancel", job]).returncode == 0
    end = cluster.wait(job, timeout=60)
    assert end.state == "CANCELLED"
    assert "Traceback" not in log.read_text()
