"""Slurm: one job's state from scontrol, or from sacct once scontrol has forgotten it.

scontrol's one line is read, not JSON: that of squeue has other types in each release, and needs a plugin that
not all sites build.
"""

from __future__ import annotations

import pwd
import re
from contextlib import suppress
from dataclasses import replace

from ddp_hpc.errors import DdpHpcError, RequestError
from ddp_hpc.queue import commands
from ddp_hpc.queue.job_state import End, JobState, Phase, clock_s, duration_s

_UNKNOWN_JOB = "Invalid job id"
_TIME = "%Y-%m-%dT%H:%M:%S"
_FIELD = re.compile(r"(?<![A-Za-z])([A-Z][A-Za-z]{1,40})=(.*?)(?= [A-Z][A-Za-z:/&]{1,40}=|$)", re.DOTALL)

# Job states of squeue.1.
_WAITING = (
    "PENDING",
    "REQUEUED",
    "REQUEUE_FED",
    "REQUEUE_HOLD",
    "RESV_DEL_HOLD",
    "SPECIAL_EXIT",
    "CONFIGURING",
)
_RUNNING = ("RUNNING", "COMPLETING", "RESIZING", "SIGNALING", "STAGE_OUT", "STOPPED", "SUSPENDED")
_ENDED: dict[str, End] = {
    "COMPLETED": "done",
    "FAILED": "failed",
    "TIMEOUT": "walltime",
    "DEADLINE": "walltime",
    "OUT_OF_MEMORY": "memory",
    "NODE_FAIL": "node",
    "BOOT_FAIL": "node",
    "CANCELLED": "cancelled",
    "REVOKED": "cancelled",
    "PREEMPTED": "preempted",
    "LAUNCH_FAILED": "not started",
    "RECONFIG_FAIL": "not started",
}
# ExitCode 0:53, Reason JobLaunchFailure: the log's folder is missing or closed. Seen with Slurm 22.05.
_NO_LOG = "53"
# In sacct's order; the last two may hold its separator.
_SACCT = "State,ExitCode,ElapsedRaw,TimelimitRaw,User,NodeList,Reason,JobName,WorkDir"


def read_job(job_id: str) -> JobState | None:
    """What Slurm knows of the job; None where it knows of no such job.

    Raises:
        RequestError: it is an array.
        DdpHpcError: Slurm gives no answer, or one that is none.
    """
    answer = commands.ask("scontrol", "--oneliner", "show", "job", job_id)
    if answer.code == 0:
        job = parse_scontrol(answer.out, job_id)
        # Only the accounts tell by whom.
        booked = _from_sacct(job_id) if job.end == "cancelled" else None
        return replace(job, reason=booked.reason) if booked and booked.end == "cancelled" else job
    if _UNKNOWN_JOB in answer.err:
        return _from_sacct(job_id)
    raise DdpHpcError(f"scontrol says: {answer.said}; try it by hand: scontrol show job {job_id}")


def parse_scontrol(text: str, job_id: str) -> JobState:
    """The job in the answer of `scontrol --oneliner show job`.

    Raises:
        RequestError: it is an array.
        DdpHpcError: the answer is none, or of another job.
    """
    # Of two fields with one name the last counts: a job's name, which may hold anything, stands before them.
    fields = dict(_FIELD.findall(text.rstrip()))
    known = {
        key: "" if value in ("(null)", "None", "N/A", "Unknown") else value for key, value in fields.items()
    }
    number, index = known.get("ArrayJobId", ""), known.get("ArrayTaskId", "")
    if number and (not index.isdecimal() or text.count("\nJobId=")):
        raise RequestError(f"job {job_id} is an array; name one job of it, such as {number}_0")
    ids = (known.get("JobId", ""), f"{number}_{index}")
    if job_id not in ids or "JobState" not in known:
        raise DdpHpcError(
            f"scontrol was asked for job {job_id} and answers {commands.plain(text[:80])!r}; try it by hand: "
            f"scontrol show job {job_id}"
        )
    return _state(job_id, known)


def job_id_of(answer: str) -> str | None:
    """The id in what `sbatch --parsable` prints, `12` or `12;cluster`."""
    match = re.fullmatch(r"([0-9]+)(?:;\S+)?\s*", answer)
    return match[1] if match else None


def cancel(job_id: str) -> str:
    """Ends the job; what Slurm has against it, empty where it has nothing."""
    answer = commands.submit("scancel", job_id)
    # Without an error it may still have written a warning.
    return answer.said if answer.code else ""


def _state(job_id: str, known: dict[str, str]) -> JobState:
    word = known["JobState"].partition(" ")[0]
    phase, end = _phase_of(word, job_id)
    code, _, signal = known.get("ExitCode", "").partition(":")
    if (end, signal) == ("failed", _NO_LOG):
        end = "not started"
    ended = phase == "ended"
    log, error_log = known.get("StdOut", ""), known.get("StdErr", "")
    return JobState(
        job_id=job_id,
        scheduler="slurm",
        phase=phase,
        word=word,
        end=end,
        name=known.get("JobName", ""),
        owner=known.get("UserId", "").partition("(")[0],
        reason=known.get("Reason", ""),
        nodes=known.get("NodeList", ""),
        elapsed_s=duration_s(known.get("RunTime", "")),
        walltime_s=duration_s(known.get("TimeLimit", "")),
        starts_at_s=clock_s(known.get("StartTime", ""), _TIME) if phase == "waiting" else None,
        exit_code=int(code) if ended and code.isdecimal() else None,
        signal=int(signal) or None if ended and signal.isdecimal() else None,
        log=log,
        error_log=error_log if error_log != log else "",
        work_dir=known.get("WorkDir", ""),
        script=known.get("Command", ""),
    )


def _phase_of(word: str, job_id: str) -> tuple[Phase, End]:
    if word in _WAITING:
        return "waiting", ""
    if word in _RUNNING:
        return "running", ""
    if word in _ENDED:
        return "ended", _ENDED[word]
    raise DdpHpcError(
        f"Slurm says that job {job_id} is {commands.plain(word[:40])!r}, no state of squeue's manual; "
        f"try it by hand: scontrol show job {job_id}"
    )


def _from_sacct(job_id: str) -> JobState | None:
    """The job in the accounts; None where it is not there or there are no accounts."""
    words = ("sacct", "--allocations", "--noheader", "--parsable2", f"--jobs={job_id}", f"--format={_SACCT}")
    try:
        answer = commands.ask(*words)
    except commands.NoAnswerError:
        return None
    lines = answer.out.splitlines()
    if answer.code or not lines:
        return None
    # A requeued job has a line for each run; the last one tells how it ended.
    values = dict(zip(_SACCT.split(","), lines[-1].split("|", _SACCT.count(",")), strict=False))
    word, _, by = values.get("State", "").partition(" ")
    phase, end = _phase_of(word, job_id)
    code, _, signal = values.get("ExitCode", "").partition(":")
    minutes, elapsed_s = values.get("TimelimitRaw", ""), values.get("ElapsedRaw", "")
    return JobState(
        job_id=job_id,
        scheduler="slurm",
        phase=phase,
        word=word,
        end=end,
        name=values.get("JobName", ""),
        owner=values.get("User", ""),
        reason=_who(by) or values.get("Reason", "").removeprefix("None"),
        nodes=values.get("NodeList", "").removeprefix("None assigned"),
        elapsed_s=int(elapsed_s) if elapsed_s.isdecimal() else None,
        walltime_s=int(minutes) * 60 if minutes.isdecimal() else None,
        exit_code=int(code) if code.isdecimal() else None,
        signal=int(signal) or None if signal.isdecimal() else None,
        work_dir=values.get("WorkDir", ""),
    )


def _who(by: str) -> str:
    """`by 1000` behind the state, in words."""
    uid = by.removeprefix("by ")
    if not uid.isdecimal():
        return ""
    name = uid
    with suppress(KeyError, OverflowError):
        name = pwd.getpwuid(int(uid)).pw_name
    return f"cancelled by {name}"
