"""The functions with which `ddp-hpc rehearse` controls the stand-in for Slurm."""

from __future__ import annotations

import re
from pathlib import Path

from ddp_hpc.lint.parse_script import Script
from ddp_hpc.rehearse import jobs
from ddp_hpc.rehearse.slurm import controller, sbatch
from ddp_hpc.rehearse.slurm.stepd import log_path
from ddp_hpc.rehearse.stand_in_scheduler import JobStatus, StandInScheduler


def _status(root: Path, number: int) -> JobStatus:
    job = jobs.load(root, number)
    state, is_over = job["state"], job["state"] in controller.OVER
    code, _, number_of_signal = job.get("exit_code", "0:0").partition(":")
    exit_code = int(code) or (128 + int(number_of_signal) if number_of_signal != "0" else 0)
    how = f"{state}, ExitCode {job.get('exit_code', '0:0')}"
    if job["runs"] > 1:
        how += f", started {job['runs']} times"
    patterns = [job["output"], job["error"]] if job["error"] else [job["output"]]
    return JobStatus(
        name=f"{number}_{job['array_index']}" if "array_index" in job else str(number),
        is_over=is_over,
        was_held=state == "PENDING" and job["reason"] == controller.HELD,
        exit_code=(exit_code if state in ("COMPLETED", "FAILED") else exit_code or 1) if is_over else None,
        how=how,
        logs=tuple(log_path(job, pattern) for pattern in patterns),
        left_over=(),  # Slurm kills all processes at the end of a job
    )


def _requested_nodes(script: Script) -> int:
    match = re.match(r"[0-9]{1,7}", script.value("--nodes") or "1")
    return max(1, int(match[0])) if match else 1


def _array_indices(script: Script) -> tuple[int, ...]:
    value = script.value("--array")
    return sbatch.array_indices({"array": value} if value else {})


STAND_IN = StandInScheduler(
    submit="sbatch",
    status=_status,
    settings=controller.Settings,
    package="ddp_hpc.rehearse.slurm",
    commands=("sbatch", "srun", "scontrol", "scancel", "squeue"),
    requested_nodes=_requested_nodes,
    array_indices=_array_indices,
    launcher="srun",
    mpiexec="hydra",
)
