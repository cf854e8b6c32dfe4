"""Queries PBS jobs with qstat, and cancels them with qdel.

qstat is called with one id at a time, since with two ids it may report only one job (openpbs#2672). Its text
output is read, because its JSON output is not always valid (openpbs#1255).

For a job array, `qstat -t` prints the array and its tasks. OpenPBS has no record of a task that has not
started, that was deleted before its start, that ended without job history, or that had ended before
`qdel 12[]`. For such a task, qstat prints attributes of the array, with the exit code of another task
(status_subjob in stat_job.c); `array_index` is missing.
"""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ddp_hpc.base.errors import DdpHpcError
from ddp_hpc.base.text_table import printable
from ddp_hpc.schedulers import run_command as commands
from ddp_hpc.schedulers.job_state import (
    End,
    JobState,
    Phase,
    clock_s,
    duration_s,
    only_job,
    same_job,
    task_index,
)

TIME_FORMAT = "%a %b %d %H:%M:%S %Y"
_UNKNOWN_JOB = re.compile(r"Unknown Job Id", re.IGNORECASE)
_NO_HISTORY = re.compile(r"not configured to maintain job history", re.IGNORECASE)
_INDICES = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9})(?::([0-9]{1,9}))?)?")
# Up to version 20, PBS remembered how a task ended. Since then, it prints "Subjob finished" for all tasks of
# which it has no record.
_ENDS_WITHOUT_RECORD: dict[str, End] = {"Subjob failed": "failed", "Subjob terminated": "cancelled"}
_WORK_DIR = re.compile(r"(?:^|,)PBS_O_WORKDIR=((?:\\.|[^,\\])*)")
_PHASES: dict[str, Phase] = {
    **dict.fromkeys("QHWTM", "waiting"),
    **dict.fromkeys("RESUB", "running"),
    **dict.fromkeys("FX", "ended"),
}
# Negative values of Exit_status, which OpenPBS's job.h defines as JOB_EXEC_*.
_ENDS: dict[int, End] = {
    **dict.fromkeys((-1, -2, -3, -4, -10, -13, -16, -17, -21, -22, -23, -30), "not started"),
    **dict.fromkeys((-14, -20), "node"),
    **dict.fromkeys((-26, -27, -31), "memory"),
    -19: "cancelled",
    -29: "walltime",
}
# Values of Exit_status whose reason must be stated, because `End` has no value for it.
_REASONS = {-25: "more CPUs were used than requested", -28: "more CPU time was used than requested"}
_SIGNALLED = 256  # PBS adds this to the number of the signal that ended the job


def read_job(job_id: str) -> JobState | None:
    """Returns the state of the job from PBS; None if there is no such job.

    Raises:
        RequestError: the job is an array.
        DdpHpcError: PBS does not answer, or its answer is invalid.
    """
    return only_job(read_jobs(job_id), job_id)


def read_jobs(job_id: str) -> list[JobState]:
    """Returns the state of the job, or for an array one state per task; empty if there is no such job.

    Tasks that have not started have one state for each range of indices. `12` can also be the array `12[]`.

    Raises:
        DdpHpcError: PBS does not answer, or its answer is invalid.
    """
    number, dot, server = job_id.partition(".")
    jobs = _ask(job_id)
    if not jobs and number.isdecimal():
        return _ask(f"{number}[]{dot}{server}")
    return [job if job.array or job.script else _with_script(job) for job in jobs]


def _with_script(job: JobState) -> JobState:
    """Returns a task of an array with its script, which PBS reports for the array only (create_subjob)."""
    array = re.sub(r"\[.*\]", "[]", job.job_id)
    for flags in ("-xf", "-f") if array != job.job_id else ():
        arguments = attributes_in(commands.ask("qstat", flags, array).out).get("Submit_arguments", "")
        if arguments:
            return replace(job, script=_script(arguments, job.work_dir))
    return job


def _ask(job_id: str) -> list[JobState]:
    tasks = "t" if "[]" in job_id else ""
    # With -x, a server without job history prints an error but exits with 0, and older servers reject -x.
    for flags in (f"-x{tasks}f", f"-{tasks}f"):
        answer = commands.ask("qstat", flags, job_id)
        if answer.code == 0 and not _NO_HISTORY.search(answer.err):
            return parse_text(answer.out, job_id)
        if _UNKNOWN_JOB.search(answer.err) or ("x" not in flags and "finished" in answer.err):
            return []
        if not _NO_HISTORY.search(answer.err):
            break
    raise DdpHpcError(f"qstat failed: {answer.said}. {_try(job_id)}")


def parse_text(text: str, job_id: str) -> list[JobState]:
    """Returns the jobs in the output of `qstat -f`: several ones for an array.

    Raises:
        DdpHpcError: the output is invalid, or is for another job.
    """
    records: dict[str, dict[str, str]] = {}
    for record in re.split(r"^Job Id:", text, flags=re.MULTILINE)[1:]:
        flat = attributes_in(record)
        match = _WORK_DIR.search(flat.get("Variable_List", ""))
        work_dir = re.sub(r"\\(.)", r"\1", match[1]) if match else ""
        records[record.partition("\n")[0].strip()] = {**flat, "Variable_List.PBS_O_WORKDIR": work_dir}
    return _jobs(records, job_id, ", ".join(records) or text)


def _jobs(records: Mapping[str, dict[str, str]], job_id: str, seen: str) -> list[JobState]:
    """Returns the job, or the tasks of the array, from the attributes of all jobs in the output of qstat."""
    name = next((record for record in records if same_job(record, job_id)), "")
    jobs = _tasks(name, records) if "[]" in name else [_state(name, records[name])] if name else []
    if not jobs:
        raise DdpHpcError(
            f"unexpected output of qstat for job {job_id}: {printable(seen[:80])!r}. {_try(job_id)}"
        )
    return jobs


def _tasks(array: str, records: Mapping[str, dict[str, str]]) -> list[JobState]:
    """Returns the states of the tasks of an array, in the order of their indices."""
    prefix, _, end = array.partition("]")
    # qsub's command line is an attribute of the array alone.
    shared = {"Submit_arguments": records[array].get("Submit_arguments", "")}
    own = {task: job for task, job in records.items() if task.startswith(prefix) and task != array}
    states = [_state(task, {**shared, **job}) for task, job in own.items()]
    tasks = [task for task in states if task.phase != "waiting" or "array_index" in own[task.job_id]]
    for indices, num_tasks, job in _waiting_tasks(records[array]):
        tasks.append(replace(_state(f"{prefix}{indices}]{end}", job), num_tasks=num_tasks))
    return [
        replace(task, array=array) for task in sorted(tasks, key=lambda task: task_index(task.job_id) or 0)
    ]


def _waiting_tasks(array: Mapping[str, str]) -> Iterator[tuple[str, int, dict[str, str]]]:
    """Yields ranges of tasks that have not started: the indices such as `1-5:2`, their number, and the
    attributes of these tasks.
    """
    word = array.get("job_state", "")
    if _PHASES.get(word) == "ended":
        return
    for indices in array.get("array_indices_remaining", "").split(","):
        if match := _INDICES.fullmatch(indices):  # "-" stands for no task
            first, last, step = int(match[1]), int(match[2] or match[1]), max(1, int(match[3] or 1))
            # B is the state of an array of which tasks have started.
            yield indices, 1 + max(0, last - first) // step, {**array, "job_state": word.replace("B", "Q")}


def attributes_in(text: str) -> dict[str, str]:
    """Returns the attributes of the job in the output of `qstat -f`, which wraps long lines."""
    parts = (line.strip().partition(" = ") for line in text.replace("\n\t", "").splitlines())
    return {key: value for key, equals, value in parts if equals}


def job_id_of(answer: str) -> str | None:
    """Returns the job id in the last line of the output of qsub; None if it is not a job id."""
    match = re.fullmatch(r"([0-9]+(?:\[\])?(?:\.[A-Za-z0-9.-]+)?)", answer)
    return match[1] if match else None


def cancel(job_id: str, tasks: Sequence[str] = ()) -> str:
    """Cancels the job, or `tasks` of the array; returns the error message of PBS, empty on success.

    `qdel 12[]` would delete the records of all tasks that have ended (req_deletejob in req_delete.c). With
    several operands, qdel was seen to leave tasks of an array without a message.
    """
    answer = commands.submit("qdel", _range_of(tasks) if tasks else job_id)
    return answer.said if answer.code else ""


def _range_of(tasks: Sequence[str]) -> str:
    """Returns the ID of all tasks from the first to the last of these, such as `12[3-7].pbs-srv`."""
    prefix, _, rest = tasks[0].partition("[")
    ranges = [_INDICES.match(task.partition("[")[2]) for task in tasks]
    indices = [int(index) for match in ranges if match for index in match.group(1, 2) if index]
    first, last = min(indices), max(indices)
    return f"{prefix}[{first if first == last else f'{first}-{last}'}]{rest.partition(']')[2]}"


def _try(job_id: str) -> str:
    return f"Try it manually: qstat -xf {shlex.quote(job_id)}"


def _state(name: str, job: Mapping[str, str]) -> JobState:
    word = job.get("job_state", "")
    if word not in _PHASES:
        raise DdpHpcError(
            f"qstat reports the unknown state {printable(word[:40])!r} for job {name}. {_try(name)}"
        )
    phase = _PHASES[word]
    is_ended = phase == "ended"
    has_record = "[" not in name or "array_index" in job
    status = _whole(job.get("Exit_status", "")) if is_ended and has_record else None
    end: End = ""
    if is_ended and has_record:
        end = _end_of(status, "stime" in job, job.get("substate", ""))
    elif is_ended:
        end = _ENDS_WITHOUT_RECORD.get(job.get("comment", ""), "unknown")
    walltime = job.get("Resource_List.walltime", "")
    keep = job.get("Keep_Files", "")
    work_dir = job.get("Variable_List.PBS_O_WORKDIR", "")
    waits = phase == "waiting"
    estimate = job.get("estimated.start_time", "") or job.get("Execution_Time", "") if waits else ""
    return JobState(
        job_id=name,
        scheduler="pbs",
        phase=phase,
        word=word,
        end=end,
        name=job.get("Job_Name", ""),
        owner=job.get("Job_Owner", "").partition("@")[0],
        reason=_reason(job, status, end) if has_record or waits else "",
        nodes="+".join(dict.fromkeys(part.partition("/")[0] for part in job.get("exec_host", "").split("+"))),
        elapsed_s=_elapsed_s(job, phase) if has_record else None,
        walltime_s=duration_s(walltime) or _whole(walltime),
        starts_at_s=clock_s(estimate, TIME_FORMAT) or _whole(estimate),
        exit_code=status if status is not None and 0 <= status < _SIGNALLED else None,
        signal=status - _SIGNALLED if status is not None and status > _SIGNALLED else None,
        log=_log(job.get("Output_Path", ""), name, "OU"),
        error_log=_log(job.get("Error_Path", ""), name, "ER") if job.get("Join_Path") == "n" else "",
        # With -k doe, the job writes to the final path of the log; otherwise PBS copies the log there at the
        # end.
        log_is_live="d" in keep and "o" in keep,
        work_dir=work_dir,
        script=_script(job.get("Submit_arguments", ""), work_dir),
    )


def _end_of(status: int | None, started: bool, substate: str) -> End:
    if status is None and not started:
        # Substate 91 means that qdel removed the job, and 92 that the server did (job_abt in req_register.c).
        return "dropped" if substate == "92" else "cancelled"
    if status is None:
        return "failed"
    if status == 0:
        return "done"
    if status < 0:
        return _ENDS.get(status, "failed")
    # The exit code is that of the script if it has handled the signal.
    return "cancelled" if substate == "91" else "failed"


def _reason(job: Mapping[str, str], status: int | None, end: End) -> str:
    why = _REASONS.get(status, "") if status is not None else ""
    if end == "dropped" and (wanted := _wanted(job)):
        why = f"it depended on {wanted}, but the server does not know that job"
        if "afterok" in wanted or "afternotok" in wanted:
            why += ", or that job did not end as required"
    state = job.get("job_state", "")
    # A task of a held array has the state Q.
    held = _hold(job) if state == "H" or (state == "Q" and job.get("Hold_Types", "n") != "n") else ""
    is_delayed = state in ("H", "W", "Q") and "Execution_Time" in job
    not_before = f"it cannot start before {job['Execution_Time']}" if is_delayed else ""
    comment = job.get("comment", "")
    # Tasks that have not started have the comment of their array.
    parts = (why, held, not_before, "" if comment.startswith("Job Array Began") else comment)
    return "; ".join(part for part in parts if part)


def _hold(job: Mapping[str, str]) -> str:
    """Returns why a job is in state H: a dependency, or a hold by its user, an operator or the system."""
    types = job.get("Hold_Types", "")
    waits = [part for part in job.get("depend", "").split(",") if part and not part.startswith("before")]
    who = {"u": "it is held by its user", "o": "it is held by an operator", "s": "it is held by the system"}
    if waits:
        who["s"] = f"it waits for {','.join(waits)}"
    reasons = [text for letter, text in who.items() if letter in types]
    # Without Hold_Types, the job waits for its dependency.
    return "; ".join(reasons) or (f"it waits for {','.join(waits)}" if waits else "")


def _wanted(job: Mapping[str, str]) -> str:
    """Returns the dependency of the job, from its attributes or from its qsub command line."""
    if after := job.get("depend", ""):
        return after
    match = re.search(r"depend=(\S+)", job.get("Submit_arguments", ""))
    return match[1] if match else ""


def _elapsed_s(job: Mapping[str, str], phase: Phase) -> int | None:
    # At the start of a job, resources_used is not set yet.
    used_s = duration_s(job.get("resources_used.walltime", ""))
    if phase != "running" or (start_s := clock_s(job.get("stime", ""), TIME_FORMAT)) is None:
        return used_s
    return max(used_s or 0, int(time.time() - start_s))


def _whole(text: str) -> int | None:
    return int(text) if re.fullmatch(r"-?[0-9]{1,12}", text) else None


def _log(text: str, name: str, ending: str) -> str:
    """Returns the path of the log from `host:path`. A path that ends in a slash is a directory."""
    path = text.partition(":")[2] or text
    if index := re.search(r"\[([0-9]+)\]", name):
        path = path.replace("^array_index^", index[1])
    return f"{path}{name}.{ending}" if path.endswith("/") else path


def _script(arguments: str, work_dir: str) -> str:
    """Returns the path of the script, the last argument of qsub; empty if qsub read it from a pipe."""
    try:
        words = shlex.split(arguments)
    except ValueError:
        return ""
    return str(Path(work_dir) / words[-1]) if words and work_dir else ""
