"""The recorded environments match those that the installed launchers set."""

import pytest

from tests.environments import load
from tests.environments.record import RECORDINGS, Recording, launch, slurm_version

from .cluster import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.check]

PLACE = [
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_NODEID",
    "SLURM_NTASKS",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_STEP_NUM_NODES",
    "SLURM_STEP_TASKS_PER_NODE",
    "SLURM_STEP_ID",
    "SLURM_GPUS_ON_NODE",
    "CUDA_VISIBLE_DEVICES",
    "PMI_RANK",
    "PMI_SIZE",
    "PMI_ID",
    "MPI_LOCALRANKID",
    "MPI_LOCALNRANKS",
    "PMIX_RANK",
]
# The other launchers are not installed, need seconds to import torch, or set more
# variables in newer versions (cray_shasta).
AT_HAND = [r for r in RECORDINGS if r.needs in ("slurm", "mpich") and r.launcher != "cray_shasta"]


@pytest.mark.parametrize("recording", AT_HAND, ids=lambda recording: recording.name)
def test_a_rank_gets_the_recorded_variables(cluster: Cluster, recording: Recording) -> None:
    if recording.slurm != (installed := slurm_version(cluster)):
        pytest.skip(f"recorded with Slurm {recording.slurm}, but {installed} is installed")
    for rank, now in launch(cluster, recording, {}).items():
        recorded = load(recording.name, rank)
        assert {name: now.get(name) for name in PLACE} == {name: recorded.get(name) for name in PLACE}
