"""Stand-in for the PBS server: its settings, and the start of jobs in the order of their dependencies."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path

from ddp_hpc.rehearse import jobs
from ddp_hpc.rehearse import settings as common
from ddp_hpc.rehearse.launchers.options import RefusedError

NO_MORE_JOBS = "job held, the machine runs no more jobs"
USER = "pbsuser"
DROPPED, RERUN = 92, 60  # substates in job.h
# PBS error numbers (pbs_error.h). Commands exit with the lowest byte.
FINISHED, UNKNOWN_JOB = 35, 153


@dataclass(frozen=True, kw_only=True)
class Settings(common.Settings):
    """The settings of the server, most of which an administrator of PBS sets with qmgr."""

    server: str = "rehearsal"
    submit_host: str = "login"
    default_chunk_ncpus: int = 1
    max_poll_downtime_s: float = 300.0  # $max_poll_downtime of pbs_mom


def schedule(root: Path) -> None:
    """Starts the jobs that can run, drops those whose dependency can no longer be satisfied, and holds the
    jobs beyond `max_jobs`. Called whenever a job is submitted, starts or ends.
    """
    settings = Settings.read(root)
    with jobs.locked(root / "schedule.lock"):
        for number in jobs.numbers(root):
            job = jobs.load(root, number)
            if job["_started"] or job["job_state"] == "F" or job.get("comment") == NO_MORE_JOBS:
                continue
            decisions = {_decision(root, kind, before) for kind, before in job["_after"]}
            if "drop" in decisions:
                # As job_abt of OpenPBS does: silently, without Exit_status, stime or comment.
                now = int(time.time())
                jobs.change(root, number, job_state="F", substate=DROPPED, history_timestamp=now)
            elif "wait" in decisions:
                continue
            elif settings.max_jobs and jobs.sequence_number(number) >= settings.first_job + settings.max_jobs:
                jobs.change(root, number, job_state="H", comment=NO_MORE_JOBS)
            else:
                jobs.change(root, number, job_state="Q", Hold_Types="n", substate=10, _started=True)
                jobs.start_daemon(root, "ddp_hpc.rehearse.pbs.mom", number)


def _decision(root: Path, kind: str, before: int) -> str:
    """Returns what happens to a job with this kind of dependency on the job `before`: start, wait or drop."""
    if not jobs.job_file(root, before).exists():
        return "drop"
    job = jobs.load(root, before)
    if kind == "after":
        return "start" if "stime" in job else "wait"
    if job["job_state"] != "F":
        return "wait"
    succeeded = job.get("Exit_status") == 0
    return "start" if kind == "afterany" or (kind == "afterok") == succeeded else "drop"


def subjob(array: int, index: int) -> int:
    """Returns the internal number of a subjob of an array."""
    return array * jobs.SUBJOBS + index + 1


def array_of(number: int) -> tuple[int, int]:
    """Returns the number of the array and the index of a subjob; the number is 0 for other jobs."""
    array, rest = divmod(number, jobs.SUBJOBS)
    return array, rest - 1


def job_id(number: int, server: str) -> str:
    """Returns the job id `12.pbs-srv`, or `12[3].pbs-srv` for the internal number of a subjob."""
    array, index = array_of(number)
    return f"{array}[{index}].{server}" if array else f"{number}.{server}"


def job_number(command: str, word: str, root: Path) -> int:
    """Returns the number of an existing job, from `12`, `12.pbs-srv` or `12[3]`.

    Raises:
        RefusedError: the job is unknown. The error has the message of the real command.
    """
    head = word.partition(".")[0]
    match = re.fullmatch(r"([0-9]{1,6})(?:\[([0-9]{1,4})\])?", head)
    number = 0 if match is None else subjob(int(match[1]), int(match[2])) if match[2] else int(match[1])
    if not jobs.job_file(root, number).exists():
        name = f"{head}.{Settings.read(root).server}"
        raise RefusedError(f"{command}: Unknown Job Id {name}", UNKNOWN_JOB)
    return number


def refuse_finished(command: str, number: int, job: jobs.Attributes) -> None:
    """Raises the error of a PBS command for a job that has finished."""
    if job["job_state"] == "F":
        name = job_id(number, job["server"])
        raise RefusedError(f"{command}: Job has finished {name}", FINISHED)
