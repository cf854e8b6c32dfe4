"""Programs with other libraries run past several walltimes on two nodes of a real Slurm."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.integrations.conftest import EXAMPLES, NEEDS

from .cluster import Cluster
from .nodes import wait_for
from .test_queue import status
from .test_training import BIN, ENVIRONMENT

pytestmark = [pytest.mark.slurm, pytest.mark.soak, pytest.mark.timeout(900)]

NUM_STEPS = 240
# Importing Lightning takes up to 15 s on a busy machine, and the examples stop 10 s before the end.
WALLTIME_S = 40
BY_SIGNAL = ["--requeue", "on-signal", "--signal", "TERM@10", "--progress", "checkpoints"]


def run_to_the_end(cluster: Cluster, name: str, folder: Path, *options: str) -> tuple[str, str]:
    """Returns the job ID and the whole log of a run of the example."""
    folder.mkdir()
    argv = [str(BIN / "python"), "-m", "ddp_hpc", "submit", "--profile", "generic_slurm", "--nodes", "2"]
    argv += ["--ranks-per-node", "1", "--walltime", "00:05:00", *options]
    argv += ["--", "python", str(EXAMPLES / name), str(NUM_STEPS), "checkpoints"]
    queued = cluster.run(argv, env=ENVIRONMENT, cwd=folder)
    assert queued.returncode == 0, queued.stderr
    job = queued.stdout.strip()
    state = folder / "runs" / "ddp" / "state"
    over = re.compile("(done|failed) ")
    wait_for("the end of the run", lambda: state.exists() and over.match(state.read_text()) is not None, 600)
    return job, (folder / f"ddp-{job}.out").read_text()


# The library also stops before KillWait begins, which can be longer than this walltime.
NAMES = [*(name for name in NEEDS if name != "library_loop.py"), "plain_ddp.py"]


@pytest.mark.parametrize("launcher", ["srun", "mpiexec", "torchrun"])
@pytest.mark.parametrize("name", NAMES)
def test_a_run_of_several_walltimes_has_the_weights_of_an_uninterrupted_one(
    cluster: Cluster, tmp_path: Path, name: str, launcher: str
) -> None:
    pytest.importorskip(NEEDS.get(name, "torch"))
    # As Slurm 23 and later exports it.
    walltime = f"export SLURM_JOB_END_TIME=$(($(date +%s) + {WALLTIME_S}))"
    options = BY_SIGNAL if name == "plain_ddp.py" else []
    options += ["--launcher", launcher]
    job, log = run_to_the_end(cluster, name, tmp_path / "interrupted", "--setup", walltime, *options)
    _, whole = run_to_the_end(cluster, name, tmp_path / "uninterrupted", "--launcher", launcher)
    assert len(status(cluster, tmp_path / "interrupted", job)["attempts"]) >= 3, log
    if name != "hf_trainer.py":  # which prints no steps
        trained = re.findall(r"^trained step (\d+)$", log, re.MULTILINE)
        assert trained == [str(step) for step in range(NUM_STEPS)]
    weights = re.compile(r"^weights (\w+)$", re.MULTILINE)
    assert len(weights.findall(whole)) == 1, whole
    # A program that completes after the signal is run once more, since exit code 0 can also mean: saved.
    assert set(weights.findall(log)) == set(weights.findall(whole))
