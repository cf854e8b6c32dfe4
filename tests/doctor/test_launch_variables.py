"""Check of the launcher's variables."""

from ddp_hpc.doctor import mpi
from ddp_hpc.doctor.check_result import Here

STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}


def test_a_rank_is_detected_without_mpi() -> None:
    assert mpi.launch(Here(STEP)).what == "rank 3 of 4, started by slurm"


def test_ranks_of_one_launch_do_not_count_as_different() -> None:
    assert mpi.launch(Here(STEP)).compared_by == mpi.launch(Here(STEP | {"SLURM_PROCID": "2"})).compared_by


def test_contradictory_launch_variables_are_a_failure() -> None:
    found = mpi.launch(Here(STEP | {"SLURM_PROCID": "9"}))
    assert found.status == "fail"
    assert "SLURM_PROCID=9" in found.what


def test_a_batch_shell_is_a_warning() -> None:
    found = mpi.launch(Here({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}))
    assert found.status == "warn"
    assert "put `srun` in front" in found.what
