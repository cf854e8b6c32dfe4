"""The functions with which `ddp-hpc rehearse` controls the stand-in for LSF."""

from __future__ import annotations

from pathlib import Path

from ddp_hpc.lint.parse_script import Script
from ddp_hpc.rehearse import jobs
from ddp_hpc.rehearse.launchers.options import RefusedError
from ddp_hpc.rehearse.stand_in_scheduler import JobStatus, StandInScheduler
from ddp_hpc.schedulers.lsf.stand_in import cluster, parse_requests


def _status(root: Path, number: int) -> JobStatus:
    job = jobs.load(root, number)
    is_over, reason = job["stat"] in cluster.OVER, job["exit_reason"]
    how = job["stat"] if job["exit_code"] is None else f"{job['stat']}, exit code {job['exit_code']}"
    return JobStatus(
        name=f"{number}[{job['array_index']}]" if "array_index" in job else str(number),
        is_over=is_over,
        was_held=job["pend_reason"] == cluster.HELD,
        exit_code=job["exit_code"],
        how=f"{how} ({reason})" if reason else how,
        logs=(cluster.output_path(number, job) if job["output"] else Path(f"{job['file']}.out"),),
        left_over=tuple(job.get("left_over", ())),
    )


def _options(script: Script) -> dict[str, str]:
    found: dict[str, str] = {}
    for one in script.read():
        found = parse_requests.merged(found, {one.flag: one.value})
    return found


def _requested_nodes(script: Script) -> int:
    try:
        return len(parse_requests.slots_per_node(_options(script)))
    except RefusedError:
        return 1  # bsub will refuse it with its own message


def _walltime_s(script: Script) -> int:
    return parse_requests.walltime_s(_options(script).get("-W", ""))


def _array_indices(script: Script) -> tuple[int, ...]:
    return parse_requests.name_and_indices(_options(script).get("-J", ""))[1]


STAND_IN = StandInScheduler(
    submit=("sh", "-c", 'exec bsub <"$1"', "bsub"),
    schedule=cluster.schedule,
    status=_status,
    settings=cluster.Settings,
    package="ddp_hpc.schedulers.lsf.stand_in",
    commands=("bsub", "bjobs", "bkill", "jsrun"),
    requested_nodes=_requested_nodes,
    walltime_s=_walltime_s,
    array_indices=_array_indices,
    mpiexec="hydra",
)
