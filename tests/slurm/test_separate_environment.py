"""Jobs on a real Slurm that are submitted by a ddp-hpc whose environment is not active."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.separate_environment import make_environment

from .cluster import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.check]

REQUEST = ["--profile", "generic_slurm", "--nodes", "2", "--ranks-per-node", "1", "--walltime", "00:05:00"]
PROGRAM = ["--", "python", "-c", "import sys; print('python of', sys.prefix)"]


@pytest.mark.parametrize("as_script", [False, True])
def test_the_ranks_use_the_environment_of_the_ddp_hpc_that_submitted_the_job(
    cluster: Cluster, tmp_path: Path, as_script: bool
) -> None:
    ddp_hpc, shell = make_environment(tmp_path / "env"), {"PATH": "/usr/bin:/bin", "PYTHONPATH": ""}
    request = [*REQUEST, *PROGRAM]
    if as_script:
        cluster.run([ddp_hpc, "render", "-o", "job.sh", *request], cwd=tmp_path, env=shell).check_returncode()
        request = ["job.sh"]
    done = cluster.run([ddp_hpc, "submit", *request], cwd=tmp_path, env=shell)
    assert done.returncode == 0, done.stderr
    job_id = done.stdout.strip()
    cluster.wait(job_id)
    assert cluster.job_output(job_id).count(f"python of {tmp_path}/env\n") == 2
