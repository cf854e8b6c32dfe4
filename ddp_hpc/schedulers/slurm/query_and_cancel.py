"""Queries Slurm jobs with scontrol, or with sacct after they have left the controller, and cancels them with
scancel.

The one-line output of scontrol is parsed instead of JSON, since the JSON of squeue differs between releases
and requires a plugin that some sites do not install.
"""

from __future__ import annotations

import pwd
import re
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from ddp_hpc.base.errors import DdpHpcError
from ddp_hpc.base.text_table import printable
from ddp_hpc.schedulers import run_command as commands
from ddp_hpc.schedulers.job_state import (
    SLUID,
    End,
    JobState,
    Phase,
    clock_s,
    duration_s,
    only_job,
    task_index,
)

# The second message is for a task that the controller has forgotten, unlike other tasks of its array.
# scontrol of Slurm 22.05 prints it to stdout.
_UNKNOWN_JOB = re.compile(r"Invalid job id|Job \S+ not found")
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
    "DEADLINE": "deadline",
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
# The reasons from squeue(1) that explain why a job ended. Other reasons are those for which it has waited,
# such as BeginTime after a requeue.
_REASONS_OF_END = re.compile(
    r"(?:PartitionDown|NodeDown|BadConstraints|SystemFailure|JobLaunchFailure|NonZeroExitCode|TimeLimit|"
    r"InactiveLimit|InvalidAccount|InvalidQOS|BurstBufferOperation|OutOfMemory|DependencyNeverSatisfied|"
    r"RaisedSignal|Prolog|ReservationDeleted)"
)
# scontrol prints these fields, whose text users choose, after the fields that this module reads first.
_FREE_TEXT = re.compile(r" (?:Command|SubmitLine|Comment|AdminComment|SystemComment|Extra|WorkDir)=")
_KNOWN_STATE = re.compile(r" JobState=[A-Z_]{1,40} Reason=")
# The tasks of an array that have not started: `0-9:3,12%2`. scontrol shortens long lists with `...`.
_INDICES = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9})(?::([0-9]{1,9}))?)?")
# The fields of sacct in the order of its output. The job name and the directory come last, since they can
# contain the separator.
_SACCT = "JobID,State,ExitCode,ElapsedRaw,TimelimitRaw,User,NodeList,Reason,JobName,WorkDir"


def read_job(job_id: str) -> JobState | None:
    """Returns the state of the job from Slurm; None if there is no such job.

    Raises:
        RequestError: the job is an array.
        DdpHpcError: Slurm does not answer, or its answer is invalid.
    """
    return only_job(read_jobs(job_id), job_id)


def read_jobs(job_id: str) -> list[JobState]:
    """Returns the state of the job, or for an array one state per task; empty if there is no such job.

    Tasks that have not started can have one state together.

    Raises:
        DdpHpcError: Slurm does not answer, or its answer is invalid.
    """
    number, clusters = _number_and_clusters(job_id)
    answer = commands.ask("scontrol", *clusters, "--oneliner", "show", "job", number)
    if answer.code and not _UNKNOWN_JOB.search(answer.err + answer.out):
        raise DdpHpcError(f"scontrol failed: {answer.said}. Try it manually: scontrol show job {job_id}")
    if answer.code:
        return _from_sacct(job_id)
    known = parse_scontrol(answer.out, job_id)
    # The controller forgets the tasks of an array one by one, and only sacct reports who cancelled a job.
    if known[0].array or any(job.end == "cancelled" for job in known):
        with suppress(DdpHpcError):
            return _combined(known, _from_sacct(job_id))
    return known


def _combined(known: list[JobState], booked: list[JobState]) -> list[JobState]:
    """Returns the jobs that the controller knows, and the ended tasks that only sacct knows."""
    who = {job.job_id: job.reason for job in booked if job.end == "cancelled"}
    # slurmdbd can receive the end of a task before its start, and then reports it as a job without an array.
    tasks = {job.job_id: job for job in booked if job.array and job.phase == "ended"}
    for job in known:
        reason = who.get(job.job_id, job.reason) if job.end == "cancelled" else job.reason
        tasks[job.job_id] = replace(job, reason=reason)
    return sorted(tasks.values(), key=lambda job: task_index(job.job_id) or 0)


def parse_scontrol(text: str, job_id: str) -> list[JobState]:
    """Returns the jobs in the output of `scontrol --oneliner show job`: several ones for an array.

    Raises:
        DdpHpcError: the output is invalid, or is for another job.
    """
    number = _number_and_clusters(job_id)[0]
    records = [_known(record) for record in _records(text, number)]
    ids = (
        records[0].get("JobId", ""),
        f"{records[0].get('ArrayJobId', '')}_{records[0].get('ArrayTaskId', '')}",
    )
    array = records[0].get("ArrayJobId", "") == number
    is_asked = array or number in ids or SLUID.fullmatch(number)
    if not is_asked or not all(_WORD.match(record.get("JobState", "")) for record in records):
        raise DdpHpcError(
            f"unexpected output of scontrol for job {job_id}: {printable(text[:80])!r}. Try it "
            f"manually: scontrol show job {job_id}"
        )
    if not array:
        named = records[0]["JobId"] if SLUID.fullmatch(number) else job_id
        return [_state(named, records[0])]
    jobs = [_state(job_id, record) for record in records]
    indices = [record.get("ArrayTaskId", "") for record in records]
    return [_task(record, job_id, index) for record, index in zip(jobs, indices, strict=True)]


def _records(text: str, number: str) -> list[str]:
    """Returns the part of the output for each task of the array `asked`; the whole output for one job."""
    lines = re.split(rf"\n(?=JobId=[0-9]+ ArrayJobId={re.escape(number)} )", text)
    return lines if re.match(rf"JobId=[0-9]+ ArrayJobId={re.escape(number)} ", text) else [text]


def _task(job: JobState, job_id: str, indices: str) -> JobState:
    """Returns the state of tasks of the array `job_id`, of which `job` is the state."""
    number, clusters = job_id.partition("@")[0], job_id.partition("@")[1:]
    listed = indices.strip("[]").partition("%")[0]
    ranges = [(int(m[1]), int(m[2] or m[1]), int(m[3] or 1)) for m in _INDICES.finditer(listed)]
    num_tasks = sum(max(0, last - first) // max(1, step) + 1 for first, last, step in ranges)
    name = f"{number}_{listed}" if listed.isdecimal() else f"{number}_[{listed}]"
    return replace(job, job_id=name + "".join(clusters), array=job_id, num_tasks=max(1, num_tasks))


def _known(record: str) -> dict[str, str]:
    fields = fields_of(record)
    return {
        key: "" if value in ("(null)", "None", "N/A", "Unknown") else value for key, value in fields.items()
    }


def fields_of(text: str) -> dict[str, str]:
    """Returns the fields of a line of `scontrol --oneliner show`, such as that of a job.

    The name of the job, which comes before the real fields, and the command line of sbatch, which comes after
    most of them, can contain text such as `JobState=FAILED`. Of two fields with the same name, the last one
    before the command line is used.
    """
    text = text.rstrip()
    every = dict(_FIELD.findall(text))
    state = _KNOWN_STATE.search(text)
    free = _FREE_TEXT.search(text, state.end()) if state else None
    return every | dict(_FIELD.findall(text[: free.start()])) if free else every


def job_id_of(answer: str) -> str | None:
    """Returns the job id in the last line of sbatch: `12`, or `12@cm4` if `12;cm4` names another cluster."""
    match = _SUBMITTED.fullmatch(answer)
    if match is None:
        return None
    return f"{match[1]}@{match[2]}" if match[2] else match[1]


def cancel(job_id: str, tasks: Sequence[str] = ()) -> str:
    """Cancels the job or all tasks of the array; returns the error message of Slurm, empty on success."""
    del tasks  # scancel does not change the tasks that have ended
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
        reason=_reason(known.get("Reason", ""), phase),
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


def _reason(text: str, phase: Phase) -> str:
    return text if phase != "ended" or _REASONS_OF_END.match(text) else ""


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


def _from_sacct(job_id: str) -> list[JobState]:
    """Returns the job from sacct, or for an array one state per task; empty if sacct has no such job, or if
    accounting is disabled.

    Raises:
        DdpHpcError: the accounting data cannot be read.
    """
    if shutil.which("sacct") is None:
        return []
    number, clusters = _number_and_clusters(job_id)
    form = ("--allocations", "--noheader", "--parsable2", f"--format={_SACCT}")
    answer = commands.ask("sacct", *clusters, *form, f"--jobs={number}")
    if answer.code and not _NO_ACCOUNTS.search(answer.err):
        raise DdpHpcError(
            f"scontrol no longer knows job {job_id}, and sacct failed: {answer.said}. Try it manually: "
            f"sacct -j {number}"
        )
    if answer.code:
        return []
    # If there are several lines with the same ID, the last one shows how the job ended.
    lines = {line.partition("|")[0]: line for line in answer.out.splitlines()}
    tasks = {key: line for key, line in lines.items() if key.startswith(f"{number}_")}
    if not tasks:
        return [_from_line(line, job_id) for line in list(lines.values())[-1:]]
    return [_task(_from_line(line, job_id), job_id, key.partition("_")[2]) for key, line in tasks.items()]


def _from_line(line: str, job_id: str) -> JobState:
    values = dict(zip(_SACCT.split(","), line.split("|", _SACCT.count(",")), strict=False))
    word, _, by = values.get("State", "").partition(" ")
    if not _WORD.match(word):
        raise DdpHpcError(
            f"unexpected output of sacct for job {job_id}: {printable(line[:80])!r}. "
            f"Try it manually: sacct -j {job_id}"
        )
    phase, end = _phase_of(word)
    code, signal = _code_and_signal(values.get("ExitCode", ""))
    minutes, elapsed_s = values.get("TimelimitRaw", ""), values.get("ElapsedRaw", "")
    return JobState(
        job_id=values["JobID"] if SLUID.fullmatch(job_id) else job_id,
        scheduler="slurm",
        phase=phase,
        word=word,
        end=end,
        name=values.get("JobName", ""),
        owner=values.get("User", ""),
        reason=_who(by) or _reason(values.get("Reason", "").removeprefix("None"), phase),
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
