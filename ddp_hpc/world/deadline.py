"""When the allocation ends: what the job script or the scheduler says, else nobody knows."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass

from ddp_hpc.errors import RequestError
from ddp_hpc.units import parse_walltime_s

# One question a job; a server that is busy must not hold the start.
_ASK_LIMIT_S = 15.0
# The scheduler's usual time from SIGTERM to SIGKILL: kill_delay of PBS, KillWait of Slurm.
_KILL_DELAYS_S = {"PBS_JOBID": 10.0, "SLURM_JOB_ID": 30.0}


@dataclass(frozen=True)
class Deadline:
    """The end of the allocation."""

    at_s: float
    """In seconds of the Unix clock."""
    source: str
    """Who said so, for people."""


def find_deadline(environ: Mapping[str, str]) -> Deadline | None:
    """The end of this job's allocation; None where nobody tells. To be asked for on rank 0 alone.

    `DDP_HPC_DEADLINE` comes first, then `SLURM_JOB_END_TIME` (Slurm 23 and later), then one question to
    squeue or qstat.

    Raises:
        RequestError: `DDP_HPC_DEADLINE` or `SLURM_JOB_END_TIME` is no time.
    """
    for name in ("DDP_HPC_DEADLINE", "SLURM_JOB_END_TIME"):
        if text := environ.get(name, ""):
            if not re.fullmatch(r"\d{1,10}(\.\d*)?", text):
                raise RequestError(
                    f"{name} is {text!r}; seconds of the Unix clock are needed, such as date +%s gives"
                )
            return Deadline(float(text), name)
    if job := environ.get("SLURM_JOB_ID", ""):
        return _of_squeue(job)
    if job := environ.get("PBS_JOBID", ""):
        return _of_qstat(job)
    return None


def kill_delay_s(environ: Mapping[str, str]) -> float | None:
    """Seconds from SIGTERM to SIGKILL at the job's end; None where no scheduler is at work.

    Raises:
        RequestError: `DDP_HPC_KILL_DELAY_S` is no such number.
    """
    text = environ.get("DDP_HPC_KILL_DELAY_S", "")
    if text:
        if not re.fullmatch(r"\d{1,6}(\.\d*)?", text):
            raise RequestError(f"DDP_HPC_KILL_DELAY_S is {text!r}; a number of seconds is needed")
        return float(text)
    return next((delay_s for name, delay_s in _KILL_DELAYS_S.items() if environ.get(name)), None)


def _of_squeue(job: str) -> Deadline | None:
    # %L is the time left, [D-]HH:MM:SS; the end itself (%e) would be in an unknown time zone.
    left = _ask("squeue", "--noheader", f"--jobs={job}", "--format=%L").strip()
    hours = left if left.count(":") == 2 else f"0:{left}"  # below an hour it leaves them out
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
            errors="replace",  # qstat prints the job's variables as they are
            timeout=_ASK_LIMIT_S,
            stdin=subprocess.DEVNULL,
            env=dict(os.environ),
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout if done.returncode == 0 else ""
