"""Checks of launcher variables and scheduler commands."""

from pathlib import Path

import pytest

from ddp_hpc.doctor import job_environment
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
    assert job_environment.launch(Here(STEP)).what == "rank 3 of 4, started by slurm"


def test_ranks_of_one_launch_do_not_count_as_different() -> None:
    assert (
        job_environment.launch(Here(STEP)).compared_by
        == job_environment.launch(Here(STEP | {"SLURM_PROCID": "2"})).compared_by
    )


def test_contradictory_launch_variables_are_a_failure() -> None:
    found = job_environment.launch(Here(STEP | {"SLURM_PROCID": "9"}))
    assert found.status == "fail"
    assert "SLURM_PROCID=9" in found.what


def test_a_batch_shell_is_a_warning() -> None:
    found = job_environment.launch(Here({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}))
    assert found.status == "warn"
    assert "put `srun` in front" in found.what


@pytest.mark.parametrize(
    ("commands", "status", "text"),
    [
        ("", "warn", "neither sbatch nor qsub"),
        ("qsub qstat qdel", "ok", "PBS (qsub, qstat, qdel)"),
        ("sbatch srun squeue scancel scontrol", "ok", "Slurm"),
        ("sbatch srun squeue scancel scontrol qsub", "ok", "Slurm"),  # its own wrapper
        ("sbatch", "warn", "but not srun, squeue, scancel, scontrol"),
    ],
)
def test_the_schedulers_commands(tmp_path: Path, commands: str, status: str, text: str) -> None:
    for command in commands.split():
        (tmp_path / command).touch(mode=0o755)
    found = job_environment.scheduler(Here({"PATH": str(tmp_path)}))
    assert found.status == status
    assert text in found.what
