"""slurmctld is down while a job requests its next attempt."""

from __future__ import annotations

from pathlib import Path

import pytest

from . import nodes, submission
from .cluster import Cluster
from .configuration import HEAD
from .nodes import wait_for
from .survival_runs import PROJECT

pytestmark = pytest.mark.slurm

# Stops in its first attempt when the controller is down, and completes in its second.
STOPS = """#!/bin/bash
say() { echo "$*" >"$DDP_HPC_RUN_DIR/.state"; mv "$DDP_HPC_RUN_DIR/.state" "$DDP_HPC_RUN_DIR/state"; }
if [[ -e $DDP_HPC_RUN_DIR/state ]]; then say done 20; exit 0; fi
touch up
until [[ -e down ]]; do sleep 0.05; done
say requeue 10 no time left
exit 75
"""


@pytest.mark.soak  # commands of Slurm try for a minute to connect; tests/supervisor tests their messages
def test_the_job_is_requeued_when_the_controller_is_back(tmp_path: Path) -> None:
    (tmp_path / "stops.sh").write_text(STOPS)
    with Cluster() as cluster:
        argv = [*submission.SUBMIT, "--nodes", "1", "--ranks-per-node", "1", "--", "bash", "stops.sh"]
        queued = cluster.run(argv, env={"PYTHONPATH": str(PROJECT)}, cwd=tmp_path)
        assert queued.returncode == 0, queued.stderr
        job_id = queued.stdout.strip()
        wait_for("the start of the program", (tmp_path / "up").exists, 60, 0.1)
        pid = (cluster.layout.run / "slurmctld.pid").read_text().strip()
        cluster.run(["kill", pid]).check_returncode()
        wait_for("the end of slurmctld", lambda: cluster.run(["kill", "-0", pid]).returncode != 0, 60, 0.1)
        (tmp_path / "down").touch()
        (log,) = tmp_path.glob(f"*-{job_id}.out")
        wait_for("the retry", lambda: "; retrying for up to " in log.read_text(), 90, 0.1)
        assert f"resume with: cd {tmp_path} && sbatch " in log.read_text()
        nodes.call(cluster.layout, HEAD, "slurmctld", "-f", cluster.layout.conf)
        assert cluster.wait(job_id, requeues_at_once=True).state == "COMPLETED", log.read_text()
        assert "; this job is requeued, and attempt 2 resumes the run\n" in log.read_text()
    assert not (tmp_path / "runs/ddp/resume").exists()
