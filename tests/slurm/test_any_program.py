"""A program that knows nothing of ddp-hpc runs past its walltime on two nodes of a real Slurm."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .cluster import Cluster
from .nodes import wait_for
from .test_queue import status
from .test_training import BIN, ENVIRONMENT, PROJECT

pytestmark = pytest.mark.slurm

PROGRAM = PROJECT / "docs" / "examples" / "plain_ddp.py"
NUM_STEPS = 60
# The program needs up to 10 s to import torch and to connect its ranks on a busy machine.
WALLTIME_S, LEAD_S = 28, 12
RUN = [
    "submit",
    "--profile",
    "generic_slurm",
    "--nodes",
    "2",
    "--ranks-per-node",
    "1",
    "--walltime",
    "00:05:00",
]
RUN += ["--requeue", "on-signal", "--signal", f"TERM@{LEAD_S}", "--progress", "checkpoint.pt"]


def run_to_the_end(cluster: Cluster, folder: Path, *options: str) -> tuple[str, str]:
    """Returns the job ID and the whole log of a run of the program."""
    folder.mkdir()
    argv = [str(BIN / "python"), "-m", "ddp_hpc", *RUN, *options]
    argv += ["--", "python", str(PROGRAM), str(NUM_STEPS), "checkpoint.pt"]
    queued = cluster.run(argv, env=ENVIRONMENT, cwd=folder)
    assert queued.returncode == 0, queued.stderr
    job = queued.stdout.strip()
    state = folder / "runs" / "ddp" / "state"
    over = re.compile("(done|failed) ")
    wait_for("the end of the run", lambda: state.exists() and over.match(state.read_text()) is not None, 200)
    return job, (folder / f"ddp-{job}.out").read_text()


@pytest.mark.soak  # three minutes; tests/supervisor has the same decisions with a stand-in for srun
def test_a_program_stopped_by_the_signal_is_resumed_until_it_is_complete(
    cluster: Cluster, tmp_path: Path
) -> None:
    # As Slurm 23 and later exports it.
    walltime = f"export SLURM_JOB_END_TIME=$(($(date +%s) + {WALLTIME_S}))"
    job, log = run_to_the_end(cluster, tmp_path / "interrupted", "--setup", walltime)
    _, whole = run_to_the_end(cluster, tmp_path / "uninterrupted")
    attempts = status(cluster, tmp_path / "interrupted", job)["attempts"]
    assert len(attempts) >= 2, log
    assert re.findall(r"^trained step (\d+)$", log, re.MULTILINE) == [str(step) for step in range(NUM_STEPS)]
    assert "ddp-hpc: stopped at step 1: the end of the walltime; attempt 2 resumes the run" in log
    weights = re.compile(r"^weights (\w+)$", re.MULTILINE)
    # A program that completes after the signal is run once more, since exit code 0 can also mean: saved.
    assert set(weights.findall(log)) == set(weights.findall(whole))
    assert len(weights.findall(whole)) == 1, whole
