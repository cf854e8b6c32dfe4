"""The functions with which `ddp-hpc rehearse` controls the stand-in for PBS."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from ddp_hpc.base.errors import EXIT_REQUEUE
from ddp_hpc.lint.parse_script import Script
from ddp_hpc.rehearse import jobs
from ddp_hpc.rehearse.pbs import server
from ddp_hpc.rehearse.pbs.request import array_indices
from ddp_hpc.rehearse.stand_in_scheduler import JobStatus, StandInScheduler


def _status(root: Path, number: int) -> JobStatus:
    job = jobs.load(root, number)
    name, exit_code = server.job_id(number, job["server"]), job.get("Exit_status")
    comment = job.get("comment", "")
    was_held = comment == server.NO_MORE_JOBS
    # PBS holds a job whose log cannot be written. In a rehearsal, such a job counts as ended.
    is_over = job["job_state"] == "F" or (job["job_state"] == "H" and bool(comment) and not was_held)
    # PBS calls every exit code but 0 a failure.
    how = "requeue" if exit_code == EXIT_REQUEUE else comment.rpartition(" and ")[2]
    logs = []
    for ending, key in (("OU", "Output_Path"), ("ER", "Error_Path")):
        destination = Path(job[key].partition(":")[2])
        spooled = root / "spool" / f"{name}.{ending}"
        logs.append(destination if "d" in job["Keep_Files"] or not spooled.exists() else spooled)
    return JobStatus(
        name=name,
        is_over=is_over,
        was_held=was_held,
        exit_code=exit_code,
        how=how if exit_code is None else f"Exit_status {exit_code} ({how})",
        logs=tuple(logs if job["Join_Path"] == "n" else logs[:1]),
        left_over=tuple(job.get("left_over", ())),
    )


def _settings(*, nodes: tuple[str, ...], **common: Any) -> server.Settings:
    names = tuple(f"{name}.rehearsal" for name in nodes)
    return server.Settings(nodes=names, **common)


def _requested_nodes(script: Script) -> int:
    selects = [value for _, name, value in script.resources() if name == "select"]
    groups = selects[-1].split("+") if selects else ["1"]
    counts = [re.match(r"[0-9]{1,7}", group) for group in groups]
    return max(1, sum(int(count[0]) if count else 1 for count in counts))


def _array_indices(script: Script) -> range:
    return array_indices(script.value("-J") or "")


STAND_IN = StandInScheduler(
    submit="qsub",
    status=_status,
    settings=_settings,
    package="ddp_hpc.rehearse.pbs",
    commands=("qsub", "qstat", "qdel"),
    requested_nodes=_requested_nodes,
    array_indices=_array_indices,
    mpiexec="pals",
)
