"""End time of the allocation, from the job script or the scheduler."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass

from ddp_hpc.errors import RequestError
from ddp_hpc.schedulers.pbs.scheduler import Pbs
from ddp_hpc.schedulers.slurm.scheduler import Slurm
from ddp_hpc.units import parse_walltime_s

# One query per job; a busy server must not delay the start.
_ASK_LIMIT_S = 15.0
# The schedulers' usual time from SIGTERM to SIGKILL, by the variable that their jobs have.
_KILL_DELAYS_S = {"PBS_JOBID": float(Pbs.kill_delay_s), "SLURM_JOB_ID": float(Slurm.kill_delay_s)}


@dataclass(frozen=True)
class Deadline:
    """The end of the allocation."""

    at_s: float
    """In seconds of the Unix clock."""
    source: str
    """Where the time comes from, for messages."""


def find_deadline(environ: Mapping[str, str]) -> Deadline | None:
    """Return the end of this job's allocation, or None if it is unknown. Call it on rank 0 only.

    The sources are `DDP_HPC_DEADLINE`, then `SLURM_JOB_END_TIME` (Slurm 23 and later), then one query with
    squeue or qstat.

    Raises:
        RequestError: `DDP_HPC_DEADLINE` or `SLURM_JOB_END_TIME` is not a time.
    """
    for name in ("DDP_HPC_DEADLINE", "SLURM_JOB_END_TIME"):
        if text := environ.get(name, ""):
            if not re.fullmatch(r"\d{1,10}(\.\d*)?", text):
                raise RequestError(
                    f"{name} must be seconds since the Unix epoch, such as the output of date +%s (got "
                    f"{text!r})"
                )
            return Deadline(float(text), name)
    if job := environ.get("SLURM_JOB_ID", ""):
        return _of_squeue(job)
    if job := environ.get("PBS_JOBID", ""):
        return _of_qstat(job)
    return None


def kill_delay_s(environ: Mapping[str, str]) -> float | None:
    """Return the seconds from SIGTERM to SIGKILL at the end of the job; None without a scheduler.

    Raises:
        RequestError: `DDP_HPC_KILL_DELAY_S` is not a number of seconds.
    """
    text = environ.get("DDP_HPC_KILL_DELAY_S", "")
    if text:
        if not re.fullmatch(r"\d{1,6}(\.\d*)?", text):
            raise RequestError(f"DDP_HPC_KILL_DELAY_S must be a number of seconds (got {text!r})")
        return float(text)
    return next((delay_s for name, delay_s in _KILL_DELAYS_S.items() if environ.get(name)), None)


def _of_squeue(job: str) -> Deadline | None:
    # %L is the time left, [D-]HH:MM:SS; the end itself (%e) would be in an unknown time zone.
    left = _ask("squeue", "--noheader", f"--jobs={job}", "--format=%L").strip()
    hours = left if left.count(":") == 2 else f"0:{left}"  # hours are omitted below one hour
    try:
        return Deadline(time.time() + parse_walltime_s(hours), "squeue")
    except RequestError:
        return None


def _of_qstat(job: str) -> Deadline | None:
    answer = _ask("qstat", "-f", "-F", "json", job)
    try:
        [attributes] = json.loads(answer)["Jobs"].values()
        walltime_s = parse_walltime_s(str(attributes["Resource_List"]["walltime"]))
        start_s = time.mktime(time.strptime(attributes["stime"], "%a %b %d %H:%M:%S %Y"))
    except (ValueError, KeyError, TypeError, AttributeError, RequestError):
        return None
    return Deadline(start_s + walltime_s, "qstat")


def _ask(*argv: str) -> str:
    try:
        done = subprocess.run(
            argv,
            capture_output=True,
            encoding="utf-8",
            errors="replace",  # qstat prints the job's variables unchanged
            timeout=_ASK_LIMIT_S,
            stdin=subprocess.DEVNULL,
            env=dict(os.environ),
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout if done.returncode == 0 else ""
