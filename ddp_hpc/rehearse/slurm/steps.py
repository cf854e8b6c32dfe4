"""The processes of the steps of a job. srun records their ids; scancel and the daemon signal them."""

from __future__ import annotations

from pathlib import Path

from ddp_hpc.rehearse.launchers.ranks import processes_of
from ddp_hpc.rehearse.processes import Process


def directory(root: Path) -> Path:
    """Returns the directory in which each running step has a directory `JOB.STEP.*`."""
    path = root / "steps"
    path.mkdir(exist_ok=True)
    return path


def of_job(root: Path, number: int) -> list[Process]:
    """Returns all processes of all steps: Slurm signals all of them, not only the tasks."""
    return processes_of(directory(root).glob(f"{number}.*"))
