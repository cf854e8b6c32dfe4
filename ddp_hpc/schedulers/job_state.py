"""The state of a job, described in the same way for all schedulers."""

from __future__ import annotations

import re
import shlex
import time
from dataclasses import dataclass
from typing import Literal

from ddp_hpc.base.errors import RequestError

Phase = Literal["waiting", "running", "ended"]
# How a job ended; "" before its end. `failed` means a non-zero exit code; all other causes are reported by
# the scheduler. `deadline`: the time in sbatch's --deadline has passed. `dropped`: the scheduler does not
# know the job on which this job depends, or that job did not end as required. `unknown`: PBS has kept no
# record of a task of a job array.
End = Literal[
    "",
    "done",
    "failed",
    "walltime",
    "deadline",
    "memory",
    "node",
    "cancelled",
    "preempted",
    "not started",
    "dropped",
    "unknown",
]

# `12@cm4` is job 12 of the Slurm cluster cm4, which is not the default cluster of this machine. `12[]` is a
# job array of PBS.
_JOB_ID = re.compile(
    r"[0-9]{1,18}(?:_[0-9]{1,9}|\[[0-9]{0,9}\])?(?:\.[A-Za-z0-9][A-Za-z0-9.-]{0,254}|@[A-Za-z0-9][A-Za-z0-9_-]{0,62})?"
)
SLUID = re.compile("s[0-9A-Z]{13}")
"""An ID of a Slurm job that is not used again, since 26.05, such as `sBQ5M854NPVZ00`."""
_TASK = re.compile(r"([0-9]+)(_?)(\[?)([0-9]+)[^]@.]*\]?")
_DURATION = re.compile(r"(?:([0-9]{1,6})-)?([0-9]{1,8}):([0-9]{2}):([0-9]{2})")
_SHORT_DURATION = re.compile(r"[0-9]{1,8}:[0-9]{2}")


@dataclass(frozen=True, kw_only=True)
class JobState:
    """The state of one job. Values are None or "" if the scheduler does not report them.

    `word` is the scheduler's name for the state. `reason` is why the job waits or how it ended. `starts_at_s`
    is the estimated start in seconds since the Unix epoch. `log_is_live` is false if the scheduler copies the
    log to its final path only at the end of the job. If the scheduler was asked for a job array, `array` is
    its ID, and the job is one of its tasks. `num_tasks` is the number of tasks that have this state
    together because they have not started.
    """

    job_id: str
    scheduler: str
    phase: Phase
    word: str
    end: End = ""
    name: str = ""
    owner: str = ""
    reason: str = ""
    nodes: str = ""
    elapsed_s: int | None = None
    walltime_s: int | None = None
    starts_at_s: float | None = None
    exit_code: int | None = None
    signal: int | None = None
    log: str = ""
    error_log: str = ""
    log_is_live: bool = True
    work_dir: str = ""
    script: str = ""
    array: str = ""
    num_tasks: int = 1


def is_job_id(text: str) -> bool:
    """Returns whether the text is the id of a job or of a job array.

    Other text must not be passed to scheduler commands.
    """
    return (_JOB_ID.fullmatch(text) or SLUID.fullmatch(text)) is not None


def check_job_id(text: str) -> str:
    """Returns `text` if it is the id of a job or of a job array.

    Raises:
        RequestError: the text is not the id of a job.
    """
    if not is_job_id(text):
        shown = ascii(text if len(text) <= 80 else f"{text[:77]}...")
        raise RequestError(
            f"{shown} is not a job ID. Use a number such as 1234, or the output of ddp-hpc submit. For one "
            "task of a job array, use an ID such as 12_3 (Slurm) or '12[3]' (PBS)."
        )
    return text


def task_index(job_id: str) -> int | None:
    """Returns the index of a task of a job array, or the first one of several tasks such as `12_[3-5]`.

    None if the job is not such a task.
    """
    match = _TASK.match(job_id)
    return int(match[4]) if match and (match[2] or match[3]) else None


def one_task(job_id: str) -> str:
    """Returns the id of the first task: `12_3` for `12_[3-5]`, and `12[3].pbs` for `12[3-5].pbs`."""
    match = _TASK.match(job_id)
    if match is None or not match[3]:
        return job_id
    task = f"{match[1]}_{match[4]}" if match[2] else f"{match[1]}[{match[4]}]"
    return task + job_id[match.end() :]


def only_job(jobs: list[JobState], job_id: str) -> JobState | None:
    """Returns the job that a scheduler has found for `job_id`; None if it has found none.

    Raises:
        RequestError: it has found the tasks of a job array.
    """
    if jobs and jobs[0].array:
        raise RequestError(
            f"job {job_id} is a job array; give the ID of one of its jobs, such as "
            f"{shlex.quote(one_task(jobs[0].job_id))}"
        )
    return jobs[0] if jobs else None


def same_job(job_id: str, other: str) -> bool:
    """Returns whether two ids refer to the same job. The server name in an id of PBS may be omitted."""
    return job_id.partition(".")[0] == other.partition(".")[0]


def duration_s(text: str) -> int | None:
    """Returns the seconds of `[D-]HH:MM:SS` or `MM:SS`; None for anything else, such as UNLIMITED."""
    if _SHORT_DURATION.fullmatch(text):
        text = f"0:{text}"
    match = _DURATION.fullmatch(text)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def clock_s(text: str, form: str) -> float | None:
    """Returns a local time in seconds since the Unix epoch; None if the text does not have this format."""
    try:
        return time.mktime(time.strptime(text, form))
    except (ValueError, OverflowError):
        return None
