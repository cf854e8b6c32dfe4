"""Converts durations: `[hour:]minute` in requests to LSF, and the formats of `bjobs -o`."""

from __future__ import annotations

import re

from ddp_hpc.schedulers.job_state import duration_s

# `60.0`, `60.0/hostA` with a normalization host, or `01:00:00` if LSB_HMS_TIME_FORMAT is set.
_LIMIT = re.compile(r"(\d{1,9})(?:\.(\d))?")
_RUN_TIME = re.compile(r"(\d{1,12})(?: second\(s\))?")
# In `0:11 L`, L marks the time until the run limit. E marks an estimate, X an exceeded estimate.
_LEFT = re.compile(r"(\d{1,6}):(\d{2}) L")


def walltime_s(text: str) -> int:
    """Returns the seconds of a valid run limit `[hour:]minute[/host]` (bsub -W)."""
    hours, _, minutes = text.partition("/")[0].rpartition(":")
    return (int(hours or 0) * 60 + int(minutes)) * 60


def minutes_of(seconds: int) -> str:
    """Returns a time as `01:30`, rounded up to minutes, the smallest unit of LSF."""
    hours, minutes = divmod(-(-seconds // 60), 60)
    return f"{hours:02}:{minutes:02}"


def limit_s(text: str) -> int | None:
    """Returns the field `runtimelimit` in seconds; None if it is empty or relative to another host."""
    match = _LIMIT.fullmatch(text)
    return int(match[1]) * 60 + int(match[2] or 0) * 6 if match else duration_s(text)


def run_time_s(text: str) -> int | None:
    """Returns the field `run_time` in seconds; None if it is empty."""
    match = _RUN_TIME.fullmatch(text)
    return int(match[1]) if match else duration_s(text)


def left_s(answer: str) -> float | None:
    """Returns the seconds until the run limit, given `runtimelimit;run_time;time_left`; None without a limit.

    `time_left` is in whole minutes. It is used only if the run limit is relative to the speed of a host.
    """
    fields = [field.strip() for field in answer.strip().split(";")]
    if len(fields) != 3:
        return None
    limit, used = limit_s(fields[0]), run_time_s(fields[1])
    if limit is not None and used is not None:
        return float(limit - used)
    match = _LEFT.fullmatch(fields[2])
    return float((int(match[1]) * 60 + int(match[2])) * 60) if match else None
