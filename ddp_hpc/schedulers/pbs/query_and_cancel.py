"""Queries PBS jobs with qstat, and cancels them with qdel.

qstat is called with one id at a time, since with two ids it may report only one job (openpbs#2672). Its JSON
output is not always valid, and it contains numbers instead of text that looks like a number (5 for `-v
foo=005`). If the JSON is invalid, the text output is used.
"""

from __future__ import annotations

import json
import re
import shlex
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from ddp_hpc.errors import DdpHpcError, RequestError
from ddp_hpc.schedulers import run_command as commands
from ddp_hpc.schedulers.job_state import End, JobState, Phase, clock_s, duration_s, same_job
from ddp_hpc.text_table import printable

TIME_FORMAT = "%a %b %d %H:%M:%S %Y"
_UNKNOWN_JOB = re.compile(r"Unknown Job Id", re.IGNORECASE)
_NO_HISTORY = re.compile(r"not configured to maintain job history", re.IGNORECASE)
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
        DdpHpcError: PBS does not answer, or its answer is invalid.
    """
    # With -x, a server without job history prints an error but exits with 0, and older servers reject -x.
    for flags in ("-xf", "-f"):
        answer = commands.ask("qstat", flags, "-F", "json", job_id)
        if answer.code == 0 and not (flags == "-xf" and _NO_HISTORY.search(answer.err)):
            try:
                return parse_json(answer.out, job_id)
            except ValueError:
                answer = commands.ask("qstat", f"{flags}w", job_id)
                if answer.code == 0:
                    return parse_text(answer.out, job_id)
        if _UNKNOWN_JOB.search(answer.err) or (flags == "-f" and "finished" in answer.err):
            _refuse_array(job_id)
            return None
        if not _NO_HISTORY.search(answer.err):
            break
    raise DdpHpcError(f"qstat failed: {answer.said}. Try it manually: qstat -xf {job_id}")


def read_jobs(job_id: str) -> list[JobState]:
    """Returns the state of the job, or no state if there is no such job. Raises what `read_job` raises."""
    job = read_job(job_id)
    return [] if job is None else [job]


def _refuse_array(job_id: str) -> None:
    """Raises RequestError if the job id is the number of a job array; the message names one job of it."""
    number, dot, server = job_id.partition(".")
    if number.isdecimal():
        array = f"{number}[]{dot}{server}"
        for flags in ("-xf", "-f"):
            answer = commands.ask("qstat", flags, "-F", "json", array)
            if answer.code == 0:
                with suppress(ValueError):
                    parse_json(answer.out, array)


def parse_json(text: str, job_id: str) -> JobState:
    """Returns the job in the output of `qstat -f -F json`.

    Raises:
        ValueError: the text is not JSON, or is not the output of qstat.
        DdpHpcError: the output is for another job, or contains no state.
    """
    try:
        answer = json.loads(text, strict=False)
        jobs = answer["Jobs"]
        found = [(name, job) for name, job in jobs.items() if same_job(name, job_id)]
        if not found and jobs:
            raise _not_of(job_id, ", ".join(jobs))
        [(name, job)] = found
        flat: dict[str, str] = {}
        for key, value in job.items():
            inner = value.items() if isinstance(value, dict) else [("", value)]
            flat |= {f"{key}.{part}".rstrip("."): _text(one) for part, one in inner}
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError("qstat printed no valid JSON description of the job") from error
    return _state(name, flat, flat.get("Variable_List.PBS_O_WORKDIR", ""))


def parse_text(text: str, job_id: str) -> JobState:
    """Returns the job in the output of `qstat -f`, with or without -w.

    Raises:
        DdpHpcError: the output is invalid, or is for another job.
    """
    name = text.partition("\n")[0].partition("Job Id:")[2].strip()
    if not same_job(name, job_id):
        raise _not_of(job_id, name or text[:80])
    flat = attributes_in(text)
    found = _WORK_DIR.search(flat.get("Variable_List", ""))
    return _state(name, flat, re.sub(r"\\(.)", r"\1", found[1]) if found else "")


def attributes_in(text: str) -> dict[str, str]:
    """Returns the attributes of the job in the output of `qstat -f`, which wraps long lines."""
    parts = (line.strip().partition(" = ") for line in text.replace("\n\t", "").splitlines())
    return {key: value for key, equals, value in parts if equals}


def job_id_of(answer: str) -> str | None:
    """Returns the job id in the last line of the output of qsub; None if it is not a job id."""
    match = re.fullmatch(r"([0-9]+(?:\[\])?(?:\.[A-Za-z0-9.-]+)?)", answer)
    return match[1] if match else None


def cancel(job_id: str) -> str:
    """Cancels the job; returns the error message of PBS, empty on success."""
    answer = commands.submit("qdel", job_id)
    return answer.said if answer.code else ""


def _not_of(job_id: str, seen: str) -> DdpHpcError:
    return DdpHpcError(
        f"unexpected output of qstat for job {job_id}: {printable(seen[:80])!r}. Try it manually: "
        f"qstat -xf {job_id}"
    )


def _text(value: object) -> str:
    return "" if value is None else str(value)


def _state(name: str, job: Mapping[str, str], work_dir: str) -> JobState:
    word = job.get("job_state", "")
    if word not in _PHASES:
        raise DdpHpcError(
            f"qstat reports the unknown state {printable(word[:40])!r} for job {name}. "
            f"Try it manually: qstat -xf {name}"
        )
    if name.endswith("[]") or "[]." in name:
        first = re.match("[0-9]+", job.get("array_indices_submitted", ""))
        one = name.replace("[]", f"[{first[0] if first else 0}]", 1)
        raise RequestError(f"job {name} is a job array; give the ID of one of its jobs, such as {one}")
    phase = _PHASES[word]
    status = _whole(job.get("Exit_status", "")) if phase == "ended" else None
    end = _end_of(status, "stime" in job, job.get("substate", "")) if phase == "ended" else ""
    walltime = job.get("Resource_List.walltime", "")
    keep = job.get("Keep_Files", "")
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
        reason=_reason(job, status, end),
        nodes="+".join(dict.fromkeys(part.partition("/")[0] for part in job.get("exec_host", "").split("+"))),
        elapsed_s=_elapsed_s(job, phase),
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
    return "cancelled" if status > _SIGNALLED and substate == "91" else "failed"


def _reason(job: Mapping[str, str], status: int | None, end: End) -> str:
    why = _REASONS.get(status, "") if status is not None else ""
    if end == "dropped" and (wanted := _wanted(job)):
        why = f"it depended on {wanted}, but the server does not know that job"
        if "afterok" in wanted or "afternotok" in wanted:
            why += ", or that job did not end as required"
    state = job.get("job_state", "")
    held = _hold(job) if state == "H" else ""
    is_delayed = state in ("H", "W", "Q") and "Execution_Time" in job
    not_before = f"it cannot start before {job['Execution_Time']}" if is_delayed else ""
    parts = (why, held, not_before, job.get("comment", ""))
    return "; ".join(part for part in parts if part)


def _hold(job: Mapping[str, str]) -> str:
    """Returns why a job is in state H: a dependency, or a hold by its user, an operator or the system."""
    types = job.get("Hold_Types", "")
    waits = [one for one in job.get("depend", "").split(",") if one and not one.startswith("before")]
    who = {"u": "it is held by its user", "o": "it is held by an operator", "s": "it is held by the system"}
    if waits:
        who["s"] = f"it waits for {','.join(waits)}"
    found = [text for letter, text in who.items() if letter in types]
    # Without Hold_Types, the job waits for its dependency.
    return "; ".join(found) or (f"it waits for {','.join(waits)}" if waits else "")


def _wanted(job: Mapping[str, str]) -> str:
    """Returns the dependency of the job, from its attributes or from its qsub command line."""
    if after := job.get("depend", ""):
        return after
    found = re.search(r"depend=(\S+)", job.get("Submit_arguments", ""))
    return found[1] if found else ""


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
