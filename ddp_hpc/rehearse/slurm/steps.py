"""The processes of a job's steps: srun leaves their numbers, scancel and the daemon signal them."""

from __future__ import annotations

from pathlib import Path

from ddp_hpc.rehearse.launchers.ranks import processes_of
from ddp_hpc.rehearse.processes import Process


def folder(root: Path) -> Path:
    """Where each running step has a folder `JOB.STEP.*`."""
    path = root / "steps"
    path.mkdir(exist_ok=True)
    return path


def of_job(root: Path, number: int) -> list[Process]:
    """Every process of every step: Slurm's signals go to all of them, not only to the tasks."""
    return processes_of(folder(root).glob(f"{number}.*"))
