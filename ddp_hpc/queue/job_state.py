"""What a scheduler says of one job, in the same words for all of them."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import Literal

from ddp_hpc.errors import RequestError

Phase = Literal["waiting", "running", "ended"]
# "" while the job has not ended. `failed`: its own exit code says so; the others are the scheduler's word.
End = Literal["", "done", "failed", "walltime", "memory", "node", "cancelled", "preempted", "not started"]

# `12@cm4`: job 12 of the Slurm cluster cm4, where that is not the one of this machine.
_JOB_ID = re.compile(
    r"[0-9]{1,18}(?:_[0-9]{1,9}|\[[0-9]{1,9}\])?(?:\.[A-Za-z0-9][A-Za-z0-9.-]{0,254}|@[A-Za-z0-9][A-Za-z0-9_-]{0,62})?"
)
_DURATION = re.compile(r"(?:([0-9]{1,6})-)?([0-9]{1,8}):([0-9]{2}):([0-9]{2})")
_SHORT_DURATION = re.compile(r"[0-9]{1,8}:[0-9]{2}")


@dataclass(frozen=True, kw_only=True)
class JobState:
    """One job; None and "" where the scheduler does not say.

    `word` is the scheduler's own for the state, `reason` why the job waits or how it
    ended. `starts_at_s` is an estimate, in seconds of the Unix clock. `log_is_live` is
    false where the log comes to its place only at the end.
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


def is_job_id(text: str) -> bool:
    """Whether it is the id of one job; nothing else may become a scheduler's argument."""
    return _JOB_ID.fullmatch(text) is not None


def check_job_id(text: str) -> str:
    """`text`, which is the id of one job.

    Raises:
        RequestError: it is something else; such a word never becomes a scheduler's argument.
    """
    if not is_job_id(text):
        shown = ascii(text if len(text) <= 80 else f"{text[:77]}...")
        raise RequestError(
            f"{shown} is no job id; a number such as 1234 is needed, or what submit printed; of an array one "
            "job, such as 12_3 (Slurm) or 12[3] (PBS)"
        )
    return text


def same_job(one: str, other: str) -> bool:
    """Whether two spellings mean one job: PBS adds its server's name, which may be left out."""
    return one.partition(".")[0] == other.partition(".")[0]


def duration_s(text: str) -> int | None:
    """Seconds of `[D-]HH:MM:SS` or `MM:SS`; None for anything else, such as UNLIMITED."""
    if _SHORT_DURATION.fullmatch(text):
        text = f"0:{text}"
    match = _DURATION.fullmatch(text)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def clock_s(text: str, form: str) -> float | None:
    """A local time in seconds of the Unix clock; None for text of another form."""
    try:
        return time.mktime(time.strptime(text, form))
    except (ValueError, OverflowError):
        return None
