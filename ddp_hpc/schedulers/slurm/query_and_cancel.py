"""Queries Slurm jobs with scontrol, or with sacct after they have left the controller, and cancels them with
scancel.

The one-line output of scontrol is parsed instead of JSON, since the JSON of squeue differs between releases
and requires a plugin that some sites do not install.
"""

from __future__ import annotations

import pwd
import re
import shutil
from contextlib import suppress
from dataclasses import replace

from ddp_hpc.errors import DdpHpcError, RequestError
from ddp_hpc.schedulers import run_command as commands
from ddp_hpc.schedulers.job_state import End, JobState, Phase, clock_s, duration_s
from ddp_hpc.text_table import printable

_UNKNOWN_JOB = "Invalid job id"
_NO_ACCOUNTS = re.compile(r"accounting storage is disabled", re.IGNORECASE)
_SUBMITTED = re.compile(
    r"(?:Submitted batch job )?([0-9]{1,18})(?:(?:;| on cluster )([A-Za-z0-9][A-Za-z0-9_-]{0,62}))?"
)
_TIME = "%Y-%m-%dT%H:%M:%S"
_FIELD = re.compile(r"(?<![A-Za-z])([A-Z][A-Za-z]{1,40})=(.*?)(?= [A-Z][A-Za-z:/&]{1,40}=|$)", re.DOTALL)

# Job states of squeue(1). A job in any other state, such as RUNNING, COMPLETING or UPDATE_DB, has not ended:
# new releases add states of active jobs, but no states of jobs that have ended.
_WAITING = (
    *("PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD"),
    *("SPECIAL_EXIT", "CONFIGURING", "POWER_UP_NODE", "EXPEDITING"),
)
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
_WORD = re.compile(r"[A-Z][A-Z_]{1,39}\b")
# ExitCode 0:53, Reason JobLaunchFailure: the log directory is missing or not writable (Slurm 22.05).
_NO_LOG = 53
# The fields of sacct in the order of its output. The job name and the directory come last, since they can
# contain the separator.
_SACCT = "State,ExitCode,ElapsedRaw,TimelimitRaw,User,NodeList,Reason,JobName,WorkDir"


def read_job(job_id: str) -> JobState | None:
    """Returns the state of the job from Slurm; None if there is no such job.

    Raises:
        RequestError: the job is an array.
        DdpHpcError: Slurm does not answer, or its answer is invalid.
    """
    number, clusters = _number_and_clusters(job_id)
    answer = commands.ask("scontrol", *clusters, "--oneliner", "show", "job", number)
    if answer.code == 0:
        job = parse_scontrol(answer.out, job_id)
        if job.end == "cancelled":
            with suppress(DdpHpcError):  # only sacct reports who cancelled a job
                if (booked := _from_sacct(job_id)) and booked.end == "cancelled":
                    return replace(job, reason=booked.reason)
        return job
    if _UNKNOWN_JOB in answer.err:
        return _from_sacct(job_id)
    raise DdpHpcError(f"scontrol failed: {answer.said}. Try it manually: scontrol show job {job_id}")


def parse_scontrol(text: str, job_id: str) -> JobState:
    """Returns the job in the output of `scontrol --oneliner show job`.

    Raises:
        RequestError: the job is an array.
        DdpHpcError: the output is invalid, or is for another job.
    """
    fields = fields_of(text)
    known = {
        key: "" if value in ("(null)", "None", "N/A", "Unknown") else value for key, value in fields.items()
    }
    number, index = known.get("ArrayJobId", ""), known.get("ArrayTaskId", "")
    if number and (not index.isdecimal() or text.count("\nJobId=")):
        raise RequestError(f"job {job_id} is a job array; give the ID of one of its jobs, such as {number}_0")
    ids = (known.get("JobId", ""), f"{number}_{index}")
    if _number_and_clusters(job_id)[0] not in ids or not _WORD.match(known.get("JobState", "")):
        raise DdpHpcError(
            f"unexpected output of scontrol for job {job_id}: {printable(text[:80])!r}. Try it "
            f"manually: scontrol show job {job_id}"
        )
    return _state(job_id, known)


def fields_of(text: str) -> dict[str, str]:
    """Returns the fields in the output of `scontrol --oneliner show job`."""
    # The job name can contain text such as JobState=. Since it comes before the real fields, and the last of
    # two fields with the same name is used, it cannot replace them.
    return dict(_FIELD.findall(text.rstrip()))


def job_id_of(answer: str) -> str | None:
    """Returns the job id in the last line of sbatch: `12`, or `12@cm4` if `12;cm4` names another cluster."""
    match = _SUBMITTED.fullmatch(answer)
    if match is None:
        return None
    return f"{match[1]}@{match[2]}" if match[2] else match[1]


def cancel(job_id: str) -> str:
    """Cancels the job; returns the error message of Slurm, empty on success."""
    number, clusters = _number_and_clusters(job_id)
    answer = commands.submit("scancel", *clusters, number)
    # scancel may have printed a warning although it succeeded.
    return answer.said if answer.code else ""


def _number_and_clusters(job_id: str) -> tuple[str, list[str]]:
    """Returns the number of a job, and the option of Slurm's commands for the cluster after `@`."""
    number, _, cluster = job_id.partition("@")
    return number, [f"--clusters={cluster}"] if cluster else []


def _state(job_id: str, known: dict[str, str]) -> JobState:
    word = known["JobState"].partition(" ")[0]
    phase, end = _phase_of(word)
    code, signal = _code_and_signal(known.get("ExitCode", ""))
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
        exit_code=code if ended else None,
        signal=signal if ended else None,
        log=log,
        error_log=error_log if error_log != log else "",
        work_dir=known.get("WorkDir", ""),
        script=known.get("Command", ""),
    )


def _code_and_signal(text: str) -> tuple[int | None, int | None]:
    """Returns the exit code and the signal in `CODE:SIGNAL`; None if it is not a number, or for signal 0."""
    code, _, signal = text.partition(":")
    return int(code) if code.isdecimal() else None, int(signal) or None if signal.isdecimal() else None


def _phase_of(word: str) -> tuple[Phase, End]:
    if word in _WAITING:
        return "waiting", ""
    if word in _ENDED:
        return "ended", _ENDED[word]
    return "running", ""


def _from_sacct(job_id: str) -> JobState | None:
    """Returns the job from sacct; None if it has no such job or accounting is disabled.

    Raises:
        DdpHpcError: the accounting data cannot be read.
    """
    if shutil.which("sacct") is None:
        return None
    number, clusters = _number_and_clusters(job_id)
    form = ("--allocations", "--noheader", "--parsable2", f"--format={_SACCT}")
    answer = commands.ask("sacct", *clusters, *form, f"--jobs={number}")
    if answer.code and not _NO_ACCOUNTS.search(answer.err):
        raise DdpHpcError(
            f"scontrol no longer knows job {job_id}, and sacct failed: {answer.said}. Try it manually: "
            f"sacct -j {number}"
        )
    lines = answer.out.splitlines()
    if answer.code or not lines:
        return None
    # A requeued job has one line per attempt. The last line shows how the job ended.
    values = dict(zip(_SACCT.split(","), lines[-1].split("|", _SACCT.count(",")), strict=False))
    word, _, by = values.get("State", "").partition(" ")
    if not _WORD.match(word):
        raise DdpHpcError(
            f"unexpected output of sacct for job {job_id}: {printable(lines[-1][:80])!r}. "
            f"Try it manually: sacct -j {job_id}"
        )
    phase, end = _phase_of(word)
    code, signal = _code_and_signal(values.get("ExitCode", ""))
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
        exit_code=code,
        signal=signal,
        work_dir=values.get("WorkDir", ""),
    )


def _who(by: str) -> str:
    """Returns `cancelled by NAME` for the text `by UID` after a job state; empty without a user id."""
    uid = by.removeprefix("by ")
    if not uid.isdecimal():
        return ""
    name = uid
    with suppress(KeyError, OverflowError):
        name = pwd.getpwuid(int(uid)).pw_name
    return f"cancelled by {name}"
