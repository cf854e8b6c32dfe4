"""The recorded environments match those that the installed launchers set."""

import pytest

from tests.environments import Case, load
from tests.environments.record import launch, program_of, recorded_cases, slurm_version, slurm_version_of

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
AT_HAND = [
    case
    for case in recorded_cases()
    if program_of(case) in ("slurm", "mpich") and case.launcher != "cray_shasta"
]


@pytest.mark.parametrize("case", AT_HAND, ids=lambda case: case.name)
def test_a_rank_gets_the_recorded_variables(cluster: Cluster, case: Case) -> None:
    if (wanted := slurm_version_of(case)) != (installed := slurm_version(cluster)):
        pytest.skip(f"recorded with Slurm {wanted}, but {installed} is installed")
    for rank, now in launch(cluster, case, {}).items():
        recorded = load(case.name, rank)
        assert {name: now.get(name) for name in PLACE} == {name: recorded.get(name) for name in PLACE}
