"""`scontrol update TimeLimit` on a running job."""

from __future__ import annotations

from pathlib import Path

import pytest

from . import submission
from .cluster import Cluster
from .nodes import wait_for
from .survival_runs import PROJECT, PYTHON

pytestmark = [pytest.mark.slurm, pytest.mark.check]

ENVIRONMENT = {"PYTHONPATH": str(PROJECT)}
# Continues until the scheduler has told of a later end.
LEFT = """import time, ddp_hpc
from pathlib import Path

deadline = ddp_hpc.deadline(margin_s=41)
Path("up").touch()
while not Path("altered").exists():
    time.sleep(0.05)
end_s = time.monotonic() + 15
while deadline.left_s() < 1000 and not deadline.should_stop() and time.monotonic() < end_s:
    time.sleep(0.05)
print("an hour is left:", deadline.left_s() > 3000, "stops:", deadline.should_stop())
"""


def submit(cluster: Cluster, folder: Path, walltime: str, *command: str) -> str:
    """Submits a job of one rank that creates the file `up`, and waits for the file."""
    request = [*submission.SUBMIT, "--nodes", "1", "--ranks-per-node", "1", "--walltime", walltime]
    done = cluster.run([*request, "--", *command], env=ENVIRONMENT, cwd=folder)
    assert done.returncode == 0, done.stderr
    wait_for("the start of the program", (folder / "up").exists, 60, 0.1)
    return done.stdout.strip()


def change_walltime(cluster: Cluster, job_id: str, minutes: int) -> None:
    cluster.run(["scontrol", "update", f"JobId={job_id}", f"TimeLimit={minutes}"]).check_returncode()


def test_a_program_in_a_job_that_was_extended_does_not_stop_early(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "left.py").write_text(LEFT)
    job_id = submit(cluster, tmp_path, "00:01:00", str(PYTHON), "left.py")
    change_walltime(cluster, job_id, 61)
    (tmp_path / "altered").touch()
    assert cluster.wait(job_id).state == "COMPLETED"
    assert "an hour is left: True stops: False\n" in cluster.job_output(job_id)
