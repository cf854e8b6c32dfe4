"""The GPUs that each rank sees with the options of srun that profiles have, on a real Slurm."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.batch.devices_seen import num_devices_seen

from .cluster import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.check]

# Slurm does not set the variable if it binds no GPUs, so all of them are visible.
SCRIPT = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node={devices} --gpus-per-node={devices}
srun {options} sh -c 'echo "gpus ${{CUDA_VISIBLE_DEVICES-0,1,2,3}}"'
"""


@pytest.mark.parametrize(
    "options",
    ["", "--gpu-bind=none", "--gpus-per-task=1", "--gpus-per-task=1 --gpu-bind=none", "--gpu-bind=single:1"],
)
def test_srun_shows_each_rank_as_many_gpus_as_the_tests_of_the_profiles_expect(
    cluster: Cluster, tmp_path: Path, options: str
) -> None:
    devices = cluster.settings.gpus_per_node
    job_id = cluster.sbatch(SCRIPT.format(devices=devices, options=options), cwd=tmp_path)
    assert cluster.wait(job_id).state == "COMPLETED"
    lines = [line for line in cluster.job_output(job_id).splitlines() if line.startswith("gpus ")]
    seen = [len(line.split()[1].split(",")) for line in lines]
    expected = num_devices_seen(f"\nexec python -m ddp_hpc.job -- srun {options} program", devices)
    assert seen == [expected] * (2 * devices)
